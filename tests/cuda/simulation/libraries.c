// Functions of cuBLAS, cuDNN and NVRTC that have to return something. All others that torch calls
// are written when this is compiled (environment.py), and take whatever they are given.

#include <stdint.h>
#include <string.h>

#include "simulation.h"

typedef void* P;

static P handle(void) {
  static char only[4096];  // nobody looks inside, and nobody frees it
  return only;
}

// -- streams -----------------------------------------------------------------------------------

// torch sets the stream before each call, in the same thread.
static __thread P current_stream;

int cublasSetStream_v2(P cublas, P stream) {
  current_stream = stream;
  return 0;
}

int cudnnSetStream(P cudnn, P stream) {
  current_stream = stream;
  return 0;
}

int cudnnGetStream(P cudnn, P* stream) {
  *stream = current_stream;
  return 0;
}

/// A function that computes. CUBLAS_STATUS_EXECUTION_FAILED if it is refused.
int simulated_library_launch(const char* name) {
  return simulated_launch(current_stream, name) ? 13 : 0;
}

// -- cuBLAS ------------------------------------------------------------------------------------

int cublasGetMathMode(P cublas, int* mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(P cublas, int* mode) {
  *mode = 0;
  return 0;
}

size_t cublasLtGetVersion(void) { return 130100; }

int cublasLtMatmulAlgoGetHeuristic(P lt, P description, P a, P b, P c, P d, P preference,
                                   int asked, char* results, int* found) {
  memset(results, 0, 96);
  *found = 1;
  return 0;
}

// -- cuDNN -------------------------------------------------------------------------------------

enum { CUDNN_VERSION = 92400 };

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(int status) { return status ? "an error" : "CUDNN_STATUS_SUCCESS"; }

void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}

int cudnnGetProperty(int which, int* value) {
  int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
  *value = parts[which];
  return 0;
}

#define NEEDS_NO_MEMORY(name, ...)        \
  int name(__VA_ARGS__, size_t* size) {   \
    *size = 0;                            \
    return 0;                             \
  }
NEEDS_NO_MEMORY(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, P cudnn, int mode, int op, P x, P z, P y, P b, P a)
NEEDS_NO_MEMORY(cudnnGetBatchNormalizationBackwardExWorkspaceSize, P cudnn, int mode, int op, P x, P y, P dy, P dz, P dx, P b, P a)
NEEDS_NO_MEMORY(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, P cudnn, int mode, int op, P a, P x)
NEEDS_NO_MEMORY(cudnnGetConvolutionForwardWorkspaceSize, P cudnn, P x, P w, P c, P y, int algorithm)
NEEDS_NO_MEMORY(cudnnGetConvolutionBackwardDataWorkspaceSize, P cudnn, P x, P w, P c, P y, int algorithm)
NEEDS_NO_MEMORY(cudnnGetConvolutionBackwardFilterWorkspaceSize, P cudnn, P x, P w, P c, P y, int algorithm)

struct Algorithm {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
};

static int find(int* found, struct Algorithm* algorithm) {
  *found = 1;
  memset(algorithm, 0, sizeof *algorithm);
  algorithm->algorithm = algorithm->determinism = 1;
  return 0;
}

#define FINDS_ONE(name)                                                                        \
  int name(P cudnn, P x, P w, P c, P y, int asked, int* found, struct Algorithm* algorithm) {   \
    return find(found, algorithm);                                                             \
  }
FINDS_ONE(cudnnGetConvolutionForwardAlgorithm_v7)
FINDS_ONE(cudnnGetConvolutionBackwardDataAlgorithm_v7)
FINDS_ONE(cudnnGetConvolutionBackwardFilterAlgorithm_v7)

#define TRIES_ONE(name)                                                                   \
  int name(P cudnn, P x, P x_data, P w, P w_data, P c, P y, P y_data, int asked, int* found, \
           struct Algorithm* algorithm, P workspace, size_t size) {                         \
    return find(found, algorithm);                                                        \
  }
TRIES_ONE(cudnnFindConvolutionForwardAlgorithmEx)
TRIES_ONE(cudnnFindConvolutionBackwardDataAlgorithmEx)
TRIES_ONE(cudnnFindConvolutionBackwardFilterAlgorithmEx)

// The graph API: a descriptor takes any attribute, and a search finds one engine.

int cudnnBackendCreateDescriptor(int kind, P* descriptor) {
  *descriptor = handle();
  return 0;
}

int cudnnBackendGetAttribute(P descriptor, int name, int type, int64_t asked, int64_t* found,
                             P values) {
  enum { RESULTS = 202, ENGINE = 300, WORKSPACE = 802, NOTES = 1304, INT64 = 3 };
  int is_number = type == INT64 && name != NOTES;
  if (is_number && asked && values) *(int64_t*)values = name == WORKSPACE;
  if (found) *found = name == RESULTS || name == ENGINE || is_number;
  return 0;
}

int cudnnBackendExecute(P cudnn, P plan, P variants) {
  return simulated_library_launch("cudnnBackendExecute");
}

// -- NVRTC, for the kernels that torch compiles at run time --------------------------------------

int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}

const char* nvrtcGetErrorString(int status) { return status ? "an error" : "NVRTC_SUCCESS"; }

int nvrtcCreateProgram(P* program, const char* source, const char* name, int headers, P contents,
                       P names) {
  *program = handle();
  return 0;
}

#define GIVES_NOTHING(thing)                              \
  int nvrtcGet##thing##Size(P program, size_t* size) {    \
    *size = 1;                                            \
    return 0;                                             \
  }                                                       \
  int nvrtcGet##thing(P program, char* text) {            \
    *text = 0;                                            \
    return 0;                                             \
  }
GIVES_NOTHING(PTX)
GIVES_NOTHING(CUBIN)
GIVES_NOTHING(ProgramLog)

int nvrtcGetLoweredName(P program, const char* name, const char** lowered) {
  *lowered = name;
  return 0;
}
