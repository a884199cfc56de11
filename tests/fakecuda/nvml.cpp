// NVML, the library of the driver that tells of GPUs: what the real nvidia-ml-py calls for the monitor.
// A device's figures are those of this process's own kernels and memory, and of FAKE_CUDA_TENANTS.
#include "runtime.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace fakecuda {
namespace {

// Of nvml.h, which no wheel brings.
enum Return { kSuccess = 0, kInvalidArgument = 2, kNotFound = 6, kInsufficientSize = 7 };
struct Memory { unsigned long long total, free, used; };
struct Utilization { unsigned gpu, memory; };
struct ProcessInfo { unsigned pid; unsigned long long used_bytes; unsigned instance, compute; };
struct ProcessUtilization {
  unsigned pid;
  unsigned long long time_us;
  unsigned sm, memory, encoder, decoder;
};
struct GpmSupport { unsigned version, is_supported; };
struct GpmMetric { unsigned id, result; double value; const char* info[3]; };
struct GpmMetrics { unsigned version, count; struct GpmSample *before, *after; GpmMetric metrics[1]; };
struct GpmSample { double time_s, busy_s; };

// Time over which utilization is told, on real devices 1/6 to 1 s.
const double kPeriod_s = 0.5;
// What the driver takes of a device that nobody uses.
const size_t kDriverBytes = 400 << 20;
// Of its multiprocessors, a kernel fills so many.
const double kFilled = 0.5;

// Another process that uses a device.
struct Tenant {
  int device;
  unsigned pid;
  double gb, percent;
};

// Written DEVICE:PID:GB:PERCENT, several of them with commas.
const std::vector<Tenant>& tenants() {
  static const std::vector<Tenant> read = [] {
    std::vector<Tenant> all;
    const char* text = getenv("FAKE_CUDA_TENANTS");
    std::istringstream each(text ? text : "");
    for (std::string one; std::getline(each, one, ',');) {
      Tenant t{};
      if (sscanf(one.c_str(), "%d:%u:%lf:%lf", &t.device, &t.pid, &t.gb, &t.percent) == 4)
        all.push_back(t);
    }
    return all;
  }();
  return read;
}

// A handle is the device's number, and 1, as 0 is none.
void* handle_of(int device) { return (void*)(intptr_t)(device + 1); }
int device_of(void* handle) { return (int)(intptr_t)handle - 1; }

double own_percent(int device) {
  double end_s = now();
  return 100 * busy_seconds(device, end_s - kPeriod_s, end_s) / kPeriod_s;
}

template <class Item>
int fill(const std::vector<Item>& found, unsigned* count, Item* to) {
  bool fits = found.size() <= *count;
  *count = (unsigned)found.size();
  if (!fits) return kInsufficientSize;
  if (!found.empty()) memcpy(to, found.data(), found.size() * sizeof(Item));
  return kSuccess;
}

}  // namespace
}  // namespace fakecuda

using namespace fakecuda;

EXPORT int nvmlInitWithFlags(unsigned) { return kSuccess; }
EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlShutdown() { return kSuccess; }

EXPORT const char* nvmlErrorString(int error) {
  return error == kNotFound ? "Not Found" : "error of the made-up NVML";
}

EXPORT int nvmlSystemGetDriverVersion(char* version, unsigned size) {
  snprintf(version, size, "made-up");
  return kSuccess;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = settings().devices;
  return kSuccess;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if ((int)index >= settings().devices) return kInvalidArgument;
  *handle = handle_of(index);
  return kSuccess;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  for (int device = 0; device < settings().devices; device++) {
    unsigned char b[16];
    char text[41];
    write_uuid((char*)b, device);
    snprintf(text, sizeof text,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
             b[15]);
    if (!strcmp(text, uuid)) {
      *handle = handle_of(device);
      return kSuccess;
    }
  }
  return kNotFound;
}

EXPORT int nvmlDeviceGetName(void*, char* name, unsigned size) {
  snprintf(name, size, "%s", kDeviceName);
  return kSuccess;
}

EXPORT int nvmlDeviceGetUtilizationRates(void* handle, Utilization* rates) {
  double percent = own_percent(device_of(handle));
  for (auto& tenant : tenants())
    if (tenant.device == device_of(handle)) percent += tenant.percent;
  rates->gpu = (unsigned)(percent < 100 ? percent + 0.5 : 100);
  rates->memory = 0;
  return kSuccess;
}

EXPORT int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  memory->total = settings().memory_bytes;
  memory->used = kDriverBytes + used_bytes(device_of(handle));
  for (auto& tenant : tenants())
    if (tenant.device == device_of(handle)) memory->used += (size_t)(tenant.gb * 1e9);
  memory->free = memory->total - memory->used;
  return kSuccess;
}

EXPORT int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  Utilization rates;
  nvmlDeviceGetUtilizationRates(handle, &rates);
  *milliwatts = 70000 + 6300 * rates.gpu;
  return kSuccess;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, ProcessInfo* to) {
  std::vector<ProcessInfo> found;
  for (auto& tenant : tenants())
    if (tenant.device == device_of(handle))
      found.push_back({tenant.pid, (size_t)(tenant.gb * 1e9), 0, 0});
  if (size_t used = used_bytes(device_of(handle))) found.push_back({(unsigned)getpid(), used, 0, 0});
  return fill(found, count, to);
}

EXPORT int nvmlDeviceGetProcessUtilization(void* handle, ProcessUtilization* to, unsigned* count,
                                           unsigned long long) {
  std::vector<ProcessUtilization> found;
  auto time_us = (unsigned long long)(1e6 * now());
  for (auto& tenant : tenants())
    if (tenant.device == device_of(handle))
      found.push_back({tenant.pid, time_us, (unsigned)tenant.percent, 0, 0, 0});
  double own = own_percent(device_of(handle));
  if (own > 0) found.push_back({(unsigned)getpid(), time_us, (unsigned)own, 0, 0, 0});
  return found.empty() ? (int)kNotFound : fill(found, count, to);
}

// Counters of the multiprocessors, as Hopper has them.

EXPORT int nvmlGpmQueryDeviceSupport(void*, GpmSupport* support) {
  support->is_supported = settings().major >= 9;
  return kSuccess;
}

EXPORT int nvmlGpmSampleAlloc(GpmSample** sample) {
  *sample = new GpmSample{};
  return kSuccess;
}

EXPORT int nvmlGpmSampleGet(void* handle, GpmSample* sample) {
  sample->time_s = now();
  sample->busy_s = busy_seconds(device_of(handle), 0, sample->time_s);
  return kSuccess;
}

EXPORT int nvmlGpmMetricsGet(GpmMetrics* asked) {
  double elapsed_s = asked->after->time_s - asked->before->time_s;
  for (unsigned i = 0; i < asked->count; i++) {
    asked->metrics[i].result = kSuccess;
    asked->metrics[i].value =
        100 * kFilled * (asked->after->busy_s - asked->before->busy_s) / elapsed_s;
  }
  return kSuccess;
}
