// The functions of functions.inc. No header of CUDA is here, for they are called with arguments of
// which at most the first is looked at.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" void fakecuda_launch_empty(void* stream);

namespace {

struct BlasHandle {
  void* stream;
};

int refuse(const char* name) {
  if (getenv("FAKE_CUDA_VERBOSE")) fprintf(stderr, "fakecuda: %s is not supported\n", name);
  return 801;  // cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED
}

}  // namespace

#define ACCEPTED(name) \
  EXPORT int name(...) { return 0; }
#define HANDLE(name)                    \
  EXPORT int name(void** handle, ...) { \
    static char any[64];                \
    *handle = any;                      \
    return 0;                           \
  }
#define BLAS_KERNEL(name)                      \
  EXPORT int name(BlasHandle* handle, ...) {   \
    fakecuda_launch_empty(handle->stream);     \
    return 0;                                  \
  }
#define REFUSED(name) \
  EXPORT int name(...) { return refuse(#name); }
#include "functions.inc"

// cuBLAS, as far as it has a state: which stream a handle works on.

EXPORT int cublasCreate_v2(BlasHandle** handle) {
  *handle = new BlasHandle{nullptr};
  return 0;
}

EXPORT int cublasDestroy_v2(BlasHandle* handle) {
  delete handle;
  return 0;
}

EXPORT int cublasSetStream_v2(BlasHandle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}

EXPORT int cublasGetMathMode(BlasHandle*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetPointerMode_v2(BlasHandle*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT size_t cublasLtGetVersion() { return 130400; }

// One algorithm fits everything; torch asks for one.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                          void* results, int* found) {
  const size_t kResultBytes = 88;
  memset(results, 0, kResultBytes);
  *found = 1;
  return 0;
}

EXPORT int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                          void*, void*, void*, void*, size_t, void* stream) {
  fakecuda_launch_empty(stream);
  return 0;
}
