// Memory, the device's and page-locked, both of it the host's; and copies.
#include "runtime.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <vector>

namespace fakecuda {
namespace {

struct Block {
  size_t size = 0;
  cudaMemoryType type = cudaMemoryTypeUnregistered;
  int device = -2;  // as CUDA says of memory that it does not know

  bool is_pageable() const { return type == cudaMemoryTypeUnregistered; }
  bool is_device() const { return type == cudaMemoryTypeDevice; }
};

// Never destroyed: streams' threads may still copy while the process ends.
auto& mutex = *new std::mutex;
auto& blocks = *new std::map<uintptr_t, Block>;  // by address
auto& used = *new std::map<int, size_t>;         // bytes of each device

const size_t kPage = 4096;
const size_t kDevicePage = 2 << 20;
const double kDeviceBytes_s = 1.5e12;
// The driver takes that much from pageable memory into its queue, and the host goes on.
const size_t kQueuedBytes = 65536;
// Of a larger memory nothing is set: no count is in it, and touching it for the first time is slow.
const size_t kSetBytes = 1 << 20;

Block block_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.upper_bound((uintptr_t)pointer);
  if (found == blocks.begin()) return {};
  --found;
  bool inside = (uintptr_t)pointer < found->first + found->second.size;
  return inside ? found->second : Block{};
}

cudaError_t allocate(void** pointer, size_t size, size_t page, cudaMemoryType type) {
  size = (size / page + (size % page > 0 || !size)) * page;
  int device = current_device();
  std::lock_guard<std::mutex> guard(mutex);
  if (type == cudaMemoryTypeDevice && used[device] + size > settings().memory_bytes)
    return report(cudaErrorMemoryAllocation);
  // not backed until it is written: 80 GB need not be there
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return report(cudaErrorMemoryAllocation);
  if (type == cudaMemoryTypeDevice) used[device] += size;
  blocks[(uintptr_t)at] = {size, type, device};
  *pointer = at;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  synchronize_device(current_device());
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find((uintptr_t)pointer);
  if (found == blocks.end()) return report(cudaErrorInvalidValue);
  const Block& block = found->second;
  if (block.is_device()) used[block.device] -= block.size;
  munmap(pointer, block.size);
  blocks.erase(found);
  return cudaSuccess;
}

// Copies in the stream's turn; from and to pageable memory the host waits, as for the driver.
cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream, bool waits = false) {
  if (!size) return cudaSuccess;
  Block target = block_of(to), source = block_of(from);
  bool pageable = target.is_pageable() || source.is_pageable();
  bool on_device = target.is_device() && source.is_device();
  Operation operation;
  operation.seconds = size / (on_device  ? kDeviceBytes_s
                              : pageable ? settings().pageable_bytes_s
                                         : settings().pinned_bytes_s);
  if (target.is_device() && source.is_pageable() && size <= kQueuedBytes && !waits) {
    auto queued = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
    operation.work = [=] { memcpy(to, queued->data(), size); };
    stream_of(stream).add(std::move(operation));
    return cudaSuccess;
  }
  operation.work = [=] { memcpy(to, from, size); };
  auto done = operation.recorded = std::make_shared<Recording>();
  stream_of(stream).add(std::move(operation));
  if (pageable || waits) done->wait(true);
  return cudaSuccess;
}

}  // namespace

size_t used_bytes(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return used[device];
}

}  // namespace fakecuda

using namespace fakecuda;

EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  COUNT_CALL;
  return allocate(pointer, size, kDevicePage, cudaMemoryTypeDevice);
}

EXPORT cudaError_t cudaFree(void* pointer) {
  COUNT_CALL;
  return release(pointer);
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  COUNT_CALL;
  return allocate(pointer, size, kPage, cudaMemoryTypeHost);
}

EXPORT cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return cudaHostAlloc(pointer, size, cudaHostAllocDefault);
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  COUNT_CALL;
  return release(pointer);
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  COUNT_CALL;
  std::lock_guard<std::mutex> guard(mutex);
  blocks[(uintptr_t)pointer] = {size, cudaMemoryTypeHost, current_device()};
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  COUNT_CALL;
  std::lock_guard<std::mutex> guard(mutex);
  blocks.erase((uintptr_t)pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  COUNT_CALL;
  Block block = block_of(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = block.type;
  attributes->device = block.device;
  attributes->hostPointer = (void*)pointer;
  if (!block.is_pageable()) attributes->devicePointer = (void*)pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  COUNT_CALL;
  std::lock_guard<std::mutex> guard(mutex);
  *total = settings().memory_bytes;
  *free = *total - used[current_device()];
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                   cudaStream_t stream) {
  COUNT_CALL;
  return copy(to, from, size, stream);
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  COUNT_CALL;
  return copy(to, from, size, 0, true);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                       cudaStream_t stream) {
  COUNT_CALL;
  return copy(to, from, size, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t stream) {
  COUNT_CALL;
  for (size_t row = 0; row < height; row++)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  COUNT_CALL;
  Operation operation;
  operation.seconds = size / kDeviceBytes_s;
  if (size <= kSetBytes) operation.work = [=] { memset(pointer, value, size); };
  stream_of(stream).add(std::move(operation));
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  return cudaMemsetAsync(pointer, value, size, 0);
}
