// Kernels: they take time in their stream's turn, and compute nothing but what `work_of` lists.
#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

namespace fakecuda {
namespace {

// Names of kernels by their host function, as nvcc's code registers them when torch is loaded.
auto& names_mutex = *new std::mutex;
auto& names = *new std::unordered_map<const void*, std::string>;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Bytes of a type by its letter in a mangled name; 2 for c10::Half and c10::BFloat16.
size_t bytes_of(char type) {
  switch (type) {
    case 'd': case 'l': return 8;
    case 'f': case 'i': return 4;
    case 's': case 'N': return 2;
    default: return 1;
  }
}

// torch's `fill_`: arguments are the number of values, the value, and the array.
std::function<void()> fill(const std::string& name, void** arguments) {
  const char* functor = "FillFunctorI";
  size_t bytes = bytes_of(name[name.find(functor) + strlen(functor)]);
  int count = *(int*)arguments[0];
  std::string value((const char*)arguments[1], bytes);
  char* array = *(char**)arguments[2];
  return [=] {
    for (int i = 0; i < count; i++) memcpy(array + i * bytes, value.data(), bytes);
  };
}

// What the kernel `name` computes, as far as a test needs it.
std::function<void()> work_of(const std::string& name, void** arguments) {
  if (contains(name, "vectorized_elementwise_kernel") && contains(name, "FillFunctorI"))
    return fill(name, arguments);
  return nullptr;
}

double seconds_of(const std::string& name, void** arguments) {
  // torch.cuda._sleep
  if (contains(name, "spin_kernel")) return *(int64_t*)arguments[0] / settings().clock_hz;
  return settings().kernel_s;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  COUNT_AS("cudaLaunchKernel");
  std::string name;
  {
    std::lock_guard<std::mutex> guard(names_mutex);
    name = names[function];
  }
  if (settings().verbose) fprintf(stderr, "fakecuda: kernel %s\n", name.c_str());
  Operation operation;
  operation.seconds = seconds_of(name, arguments);
  operation.work = work_of(name, arguments);
  stream_of(stream).add(std::move(operation), true);
  return cudaSuccess;
}

// Of launches written as kernel<<<...>>>(...), between the two calls that nvcc makes of it.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

}  // namespace fakecuda

using namespace fakecuda;

// For stubs.cpp: a kernel that computes nothing.
extern "C" void fakecuda_launch_empty(void* stream) {
  Operation operation;
  operation.seconds = settings().kernel_s;
  stream_of((cudaStream_t)stream).add(std::move(operation), true);
}

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                    cudaStream_t stream) {
  return launch(function, arguments, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments,
                                               size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                       void** arguments) {
  return launch(function, arguments, configuration->stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
  return launch((const void*)kernel, arguments, stream);
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 10 * settings().major + settings().minor;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                                 size_t) {
  *blocks = 4;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                          int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

// What nvcc's code calls when a library of kernels is loaded, and around a launch.

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                   uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> guard(names_mutex);
  names[function] = name;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                              void* stream) {
  auto& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *(cudaStream_t*)stream = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
