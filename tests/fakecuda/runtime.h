// What the parts of the made-up CUDA runtime share. README.md says what it is for.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

// A function of CUDA, which takes the place of the real one in this process.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fakecuda {

// Read once from the environment; README.md lists the variables.
struct Settings {
  int devices;
  size_t memory_bytes;
  int major, minor;  // compute capability
  double kernel_s, launch_s;
  double pinned_bytes_s, pageable_bytes_s;
  size_t queue_depth;
  double clock_hz;
  bool verbose;
};
const Settings& settings();

// Seconds of the monotonic clock.
double now();

// The calling thread's device.
int current_device();

// Returns `error`, and keeps it for cudaGetLastError.
cudaError_t report(cudaError_t error);

// Counts the calls of the function that it stands in, for tests.
struct Counter {
  explicit Counter(const char* name);
  const char* name;
  std::atomic<long> calls{0};
};
#define COUNT_AS(name)                        \
  static fakecuda::Counter call_counter{name}; \
  call_counter.calls++
#define COUNT_CALL COUNT_AS(__func__)

class Stream;

// A point of a stream. Several may lie at one place; the stream passes them together.
struct Recording {
  Stream* stream = nullptr;
  uint64_t place = 0;
  double passed_s = 0;  // valid once it is passed

  bool passed() const;
  // A spinning host keeps its core busy, as cudaEventSynchronize does without cudaEventBlockingSync.
  void wait(bool spins) const;
};
using RecordingPtr = std::shared_ptr<Recording>;

// What a stream does in its turn.
struct Operation {
  double seconds = 0;            // that the device takes at least
  std::function<void()> work;    // done by the stream's thread
  RecordingPtr awaited;          // of another stream: begin when it is passed
  RecordingPtr recorded;         // passed when this is done
  bool is_kernel = false;        // set by the stream
  double issued_s = 0;           // set by the stream
  uint64_t place = 0;            // set by the stream
};

// A queue of operations and the thread that does them in order. Streams live as long as the process.
class Stream {
 public:
  Stream(int device, int priority);
  const int device;
  const int priority;

  // A launch waits while the queue is full, as that of a real device; other operations never do.
  void add(Operation operation, bool is_launch = false);
  // Returns the point behind all that was added so far.
  RecordingPtr record();
  bool idle();

 private:
  friend struct Recording;
  void run();
  double perform(Operation& operation, double free_s);

  std::mutex mutex_;
  std::condition_variable added_, advanced_;
  std::deque<Operation> queue_;
  uint64_t added_count_ = 0;
  std::atomic<uint64_t> done_count_{0};
};

// The stream behind a handle; 0 and the two special handles are the device's default stream.
Stream& stream_of(cudaStream_t handle);

// Waits until the device has done all work of all its streams, spinning as the driver does.
void synchronize_device(int device);

// For nvml.cpp.
const char* const kDeviceName = "Made-up GPU";
// 16 of them, which tell the devices apart.
void write_uuid(char* bytes, int device);
// Bytes of the device that this process has allocated.
size_t used_bytes(int device);
// Seconds between two times in which a kernel ran on the device; 0 is the process's begin.
double busy_seconds(int device, double from_s, double to_s);

}  // namespace fakecuda
