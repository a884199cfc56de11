// Streams and events: a thread for each stream, and the points that it has passed.
#include "runtime.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <vector>

namespace fakecuda {

static void sleep_until(double seconds) {
  timespec time;
  time.tv_sec = (time_t)seconds;
  time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr)) {
  }
}

// How late a stream's thread may come to real work without the device's clock being late too.
static const double kLateness_s = 2e-4;

namespace {
struct Interval {
  double begin_s, end_s;
};
// When kernels ran, by device: the last ones, which do not overlap, and the sum of all.
struct Busy {
  std::deque<Interval> last;
  double total_s = 0;

  void add(double begin_s, double end_s) {
    if (!last.empty()) begin_s = std::max(begin_s, last.back().end_s);
    if (begin_s >= end_s) return;
    total_s += end_s - begin_s;
    last.push_back({begin_s, end_s});
    while (last.front().end_s < end_s - 2) last.pop_front();
  }
};
auto& busy_mutex = *new std::mutex;
auto& busy = *new std::map<int, Busy>;
}  // namespace

double busy_seconds(int device, double from_s, double to_s) {
  std::lock_guard<std::mutex> guard(busy_mutex);
  auto& of = busy[device];
  double sum_s = from_s > 0 ? 0 : of.total_s;
  for (auto& each : of.last) {
    if (from_s > 0)
      sum_s += std::max(0.0, std::min(each.end_s, to_s) - std::max(each.begin_s, from_s));
    else
      // what is still to come
      sum_s -= std::max(0.0, each.end_s - std::max(each.begin_s, to_s));
  }
  return sum_s;
}

bool Recording::passed() const { return stream->done_count_.load() >= place; }

void Recording::wait(bool spins) const {
  if (spins) {
    while (!passed()) sched_yield();
    return;
  }
  std::unique_lock<std::mutex> lock(stream->mutex_);
  stream->advanced_.wait(lock, [this] { return passed(); });
}

Stream::Stream(int device, int priority) : device(device), priority(priority) {
  std::thread([this] { run(); }).detach();
}

void Stream::add(Operation operation, bool is_launch) {
  if (is_launch && settings().launch_s > 0) {
    double until_s = now() + settings().launch_s;
    while (now() < until_s) {
    }
  }
  operation.issued_s = now();
  operation.is_kernel = is_launch;
  std::unique_lock<std::mutex> lock(mutex_);
  while (is_launch && queue_.size() >= settings().queue_depth) {
    lock.unlock();
    usleep(20);
    lock.lock();
  }
  operation.place = ++added_count_;
  if (operation.recorded) {
    operation.recorded->stream = this;
    operation.recorded->place = operation.place;
  }
  queue_.push_back(std::move(operation));
  added_.notify_one();
}

RecordingPtr Stream::record() {
  Operation operation;
  auto point = operation.recorded = std::make_shared<Recording>();
  add(std::move(operation));
  return point;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return queue_.empty();
}

// Does one operation; returns when the device had done it, by the clock that events tell.
double Stream::perform(Operation& operation, double free_s) {
  double begin_s = std::max(free_s, operation.issued_s);
  if (operation.awaited) {
    operation.awaited->wait(false);
    begin_s = std::max(begin_s, operation.awaited->passed_s);
  }
  double end_s = begin_s + operation.seconds;
  if (operation.is_kernel) {
    std::lock_guard<std::mutex> guard(busy_mutex);
    busy[device].add(begin_s, end_s);
  }
  if (operation.work) {
    operation.work();
    end_s = std::max(end_s, now() - kLateness_s);
  }
  if (operation.seconds > 0 && end_s > now()) sleep_until(end_s);
  return end_s;
}

void Stream::run() {
  double free_s = 0;  // when the device had done the operation before
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    added_.wait(lock, [this] { return !queue_.empty(); });
    uint64_t done = 0;
    do {
      Operation& operation = queue_.front();  // a deque's elements stay where they are
      lock.unlock();
      free_s = perform(operation, free_s);
      if (operation.recorded) operation.recorded->passed_s = free_s;
      done = operation.place;
      lock.lock();
      queue_.pop_front();
      // Points at one place are passed together, or a busy machine would show the first one alone.
    } while (!queue_.empty() && !queue_.front().awaited && !queue_.front().work &&
             queue_.front().seconds == 0);
    done_count_ = done;
    advanced_.notify_all();
  }
}

// The streams of each device, the default one first.
static std::mutex& streams_mutex = *new std::mutex;
static auto& streams = *new std::vector<std::vector<Stream*>>;

static std::vector<Stream*>& streams_of(int device) {
  if (streams.empty()) streams.resize(settings().devices);
  auto& all = streams[device];
  if (all.empty()) all.push_back(new Stream(device, 0));
  return all;
}

Stream& stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > (uintptr_t)cudaStreamPerThread) return *(Stream*)handle;
  std::lock_guard<std::mutex> guard(streams_mutex);
  return *streams_of(current_device())[0];
}

void synchronize_device(int device) {
  std::vector<RecordingPtr> ends;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    for (auto* stream : streams_of(device)) ends.push_back(stream->record());
  }
  for (auto& end : ends) end->wait(true);
}

// Counts calls for timed events by themselves too: those of torch's allocators are not timed.
#define COUNT_EVENT(name, flags)          \
  COUNT_AS(name);                         \
  if (!((flags) & cudaEventDisableTiming)) { \
    COUNT_AS(name " timed");              \
  }

namespace {
struct Event {
  unsigned flags;
  int device;
  std::mutex mutex;
  RecordingPtr recorded;  // none yet: counts as passed

  RecordingPtr last() {
    std::lock_guard<std::mutex> guard(mutex);
    return recorded;
  }
};
}  // namespace

}  // namespace fakecuda

using namespace fakecuda;

// Streams.

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  COUNT_CALL;
  int device = current_device();
  std::lock_guard<std::mutex> guard(streams_mutex);
  auto& all = streams_of(device);
  all.push_back(new Stream(device, priority));
  *stream = (cudaStream_t)all.back();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  COUNT_CALL;
  return stream_of(stream).idle() ? cudaSuccess : report(cudaErrorNotReady);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  COUNT_CALL;
  stream_of(stream).record()->wait(true);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  COUNT_CALL;
  Operation operation;
  operation.awaited = ((Event*)event)->last();
  if (operation.awaited) stream_of(stream).add(std::move(operation));
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  COUNT_CALL;
  Operation operation;
  operation.work = [=] { function(data); };
  stream_of(stream).add(std::move(operation));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                         void* data, unsigned) {
  COUNT_CALL;
  Operation operation;
  operation.work = [=] { callback(stream, cudaSuccess, data); };
  stream_of(stream).add(std::move(operation));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long*, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}

// Events.

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  COUNT_EVENT("cudaEventCreate", flags);
  *event = (cudaEvent_t) new Event{flags, current_device(), {}, {}};
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  COUNT_EVENT("cudaEventDestroy", ((Event*)event)->flags);
  delete (Event*)event;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  auto& event = *(Event*)handle;
  COUNT_EVENT("cudaEventRecord", event.flags);
  auto& on = stream_of(stream);
  if (event.device != on.device) return report(cudaErrorInvalidResourceHandle);
  std::lock_guard<std::mutex> guard(event.mutex);
  event.recorded = on.record();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  COUNT_EVENT("cudaEventQuery", ((Event*)event)->flags);
  auto point = ((Event*)event)->last();
  return !point || point->passed() ? cudaSuccess : report(cudaErrorNotReady);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  COUNT_CALL;
  auto& event = *(Event*)handle;
  if (auto point = event.last()) point->wait(!(event.flags & cudaEventBlockingSync));
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  COUNT_CALL;
  if ((((Event*)start)->flags | ((Event*)end)->flags) & cudaEventDisableTiming)
    return report(cudaErrorInvalidResourceHandle);
  auto from = ((Event*)start)->last(), to = ((Event*)end)->last();
  if (!from || !to) return report(cudaErrorInvalidResourceHandle);
  if (!from->passed() || !to->passed()) return report(cudaErrorNotReady);
  *ms = (float)(1e3 * (to->passed_s - from->passed_s));
  return cudaSuccess;
}
