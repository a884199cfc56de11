// The devices, which of them a thread uses, and what the driver says of them.
#include "runtime.h"

#include <cstdio>
#include <cstring>

namespace fakecuda {

static thread_local int device_of_thread = 0;

int current_device() { return device_of_thread; }

static const int kVersion = 13020;
static const int kMultiprocessors = 132;
static const int kThreadsPerBlock = 1024;
static const int kThreadsPerMultiprocessor = 2048;
static const int kWarp = 32;
static const int kSharedBytes = 49152;
static const int kSharedBytesOptin = 232448;

void write_uuid(char* bytes, int device) {
  for (int i = 0; i < 16; i++) bytes[i] = (char)(16 * device + i);
}

}  // namespace fakecuda

using namespace fakecuda;

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return report(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  strcpy(p.name, kDeviceName);
  write_uuid(p.uuid.bytes, device);
  p.totalGlobalMem = settings().memory_bytes;
  p.major = settings().major;
  p.minor = settings().minor;
  p.multiProcessorCount = kMultiprocessors;
  p.warpSize = kWarp;
  p.maxThreadsPerBlock = kThreadsPerBlock;
  p.maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.maxBlocksPerMultiProcessor = 32;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.sharedMemPerBlock = kSharedBytes;
  p.sharedMemPerBlockOptin = kSharedBytesOptin;
  p.sharedMemPerMultiprocessor = 233472;
  p.totalConstMem = 65536;
  p.l2CacheSize = 50 << 20;
  p.memoryBusWidth = 5120;
  p.asyncEngineCount = 3;
  p.textureAlignment = 512;
  p.unifiedAddressing = p.concurrentKernels = p.canMapHostMemory = p.cooperativeLaunch = 1;
  p.pciBusID = device + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = settings().major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = settings().minor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = kThreadsPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = kWarp; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedBytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedBytesOptin; break;
    case cudaDevAttrClockRate: *value = (int)(settings().clock_hz / 1e3); break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  COUNT_CALL;
  synchronize_device(current_device());
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// torch looks up what only newer drivers have; there is nothing of the kind.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// The driver, as libcuda.so.1. Its errors are ints here, so that its header is not needed.

EXPORT int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

EXPORT int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }

EXPORT int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return 0;
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

EXPORT int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT int cuCtxGetCurrent(void** context) {
  static char any;
  *context = &any;
  return 0;
}

// Refused, or torch would take the memory for another allocator's.
EXPORT int cuPointerGetAttribute(void*, int, unsigned long) { return cudaErrorInvalidValue; }

EXPORT int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_UNKNOWN";
  return 0;
}

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "error of the made-up driver";
  return 0;
}
