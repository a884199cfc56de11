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

// torch's `cat` of tensors with one dimension. Arguments are the output, and of at most N inputs their
// places, offsets, sizes and numbers of values, whether they are contiguous, and sizes and strides.
std::function<void()> cat(const std::string& name, void** arguments, unsigned inputs) {
  int bytes, dimensions, most;
  const char* type = strstr(name.c_str(), "OpaqueTypeILj");
  if (!type || sscanf(type, "OpaqueTypeILj%dEEEjLi%dELi%dE", &bytes, &dimensions, &most) != 3 ||
      dimensions != 1)
    return nullptr;
  struct Layout { unsigned sizes[4], strides[4]; };
  struct Input { const char* from; unsigned count, stride; };
  std::vector<Input> all;
  auto* places = (const char**)arguments[1];
  auto* counts = (unsigned*)(places + most) + 2 * most;
  auto* contiguous = (bool*)(counts + most);
  auto* layouts = (Layout*)(contiguous + most);
  for (unsigned i = 0; i < inputs; i++)
    all.push_back({places[i], counts[i], contiguous[i] ? 1 : layouts[i].strides[0]});
  char* output = *(char**)arguments[0] + (size_t)bytes * ((unsigned*)(places + most))[0];
  return [=] {
    char* to = output;
    for (auto& input : all)
      for (unsigned i = 0; i < input.count; i++, to += bytes)
        memcpy(to, input.from + (size_t)i * input.stride * bytes, bytes);
  };
}

// torch's `topk`: the first ones are the largest, whatever the values are.
std::function<void()> topk(void** arguments) {
  unsigned k = *(unsigned*)arguments[2], rows = *(unsigned*)arguments[4];
  auto* indices = *(int64_t**)arguments[8];
  return [=] {
    for (size_t i = 0; i < (size_t)rows * k; i++) indices[i] = i % k;
  };
}

// What the kernel `name` computes, as far as a test needs it.
std::function<void()> work_of(const std::string& name, void** arguments, unsigned blocks_y) {
  if (contains(name, "vectorized_elementwise_kernel") && contains(name, "FillFunctorI"))
    return fill(name, arguments);
  if (contains(name, "CatArrayBatchedCopy")) return cat(name, arguments, blocks_y);
  if (contains(name, "sbtopk10gatherTopKI")) return topk(arguments);
  return nullptr;
}

double seconds_of(const std::string& name, void** arguments) {
  // torch.cuda._sleep
  if (contains(name, "spin_kernel")) return *(int64_t*)arguments[0] / settings().clock_hz;
  return settings().kernel_s;
}

cudaError_t launch(const void* function, dim3 grid, void** arguments, cudaStream_t stream) {
  COUNT_AS("cudaLaunchKernel");
  std::string name;
  {
    std::lock_guard<std::mutex> guard(names_mutex);
    name = names[function];
  }
  if (settings().verbose) fprintf(stderr, "fakecuda: kernel %s\n", name.c_str());
  Operation operation;
  operation.seconds = seconds_of(name, arguments);
  operation.work = work_of(name, arguments, grid.y);
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

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3, void** arguments, size_t,
                                    cudaStream_t stream) {
  return launch(function, grid, arguments, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3,
                                               void** arguments, size_t, cudaStream_t stream) {
  return launch(function, grid, arguments, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                       void** arguments) {
  return launch(function, configuration->gridDim, arguments, configuration->stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
  return launch((const void*)kernel, grid, arguments, stream);
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
