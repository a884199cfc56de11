// Settings, counted calls, errors.
#include "runtime.h"

#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace fakecuda {

static double from_environment(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value && *value ? atof(value) : otherwise;
}

const Settings& settings() {
  static const Settings read = {
      (int)from_environment("FAKE_CUDA_DEVICES", 1),
      (size_t)(from_environment("FAKE_CUDA_GB", 80) * 1e9),
      (int)from_environment("FAKE_CUDA_MAJOR", 9),
      (int)from_environment("FAKE_CUDA_MINOR", 0),
      from_environment("FAKE_CUDA_KERNEL_US", 5) * 1e-6,
      from_environment("FAKE_CUDA_LAUNCH_US", 0) * 1e-6,
      from_environment("FAKE_CUDA_PINNED_GBS", 25) * 1e9,
      from_environment("FAKE_CUDA_PAGEABLE_GBS", 6) * 1e9,
      (size_t)from_environment("FAKE_CUDA_DEPTH", 1024),
      from_environment("FAKE_CUDA_HZ", 1.755e9),
      from_environment("FAKE_CUDA_VERBOSE", 0) != 0,
  };
  return read;
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Never destroyed: streams' threads run until the process ends, also while it ends.
static std::mutex& counters_mutex = *new std::mutex;
static std::vector<Counter*>& counters() {
  static auto& all = *new std::vector<Counter*>;
  return all;
}

Counter::Counter(const char* name) : name(name) {
  std::lock_guard<std::mutex> guard(counters_mutex);
  counters().push_back(this);
}

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace fakecuda

using namespace fakecuda;

// For tests, by ctypes.

// Returns how often the function was called since the last fakert_zero.
EXPORT long fakert_count(const char* name) {
  std::lock_guard<std::mutex> guard(counters_mutex);
  long calls = 0;
  for (auto* counter : counters())
    if (!strcmp(counter->name, name)) calls += counter->calls;
  return calls;
}

EXPORT void fakert_zero() {
  std::lock_guard<std::mutex> guard(counters_mutex);
  for (auto* counter : counters()) counter->calls = 0;
}

EXPORT void fakert_print() {
  std::lock_guard<std::mutex> guard(counters_mutex);
  for (auto* counter : counters())
    if (counter->calls) fprintf(stderr, "fakecuda: %8ld %s\n", counter->calls.load(), counter->name);
}

// Errors.

EXPORT cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported by the made-up CUDA runtime";
    default: return "unknown error";
  }
}
