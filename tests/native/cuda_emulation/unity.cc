// The CUDA library with everything but the GPU, in one translation unit, for XLA's headers take long to read; but for
// matmul.cc, matmul_gradient.cc and product.cc, whose helpers have the names of others'.
#include <algorithm>

#include "common/buffers.cc"
#include "common/checks.cc"
#include "common/copy_checks.cc"
#include "cublaslt.cc"
#include "cuda/convert.cu"
#include "cuda/copies.cc"
#include "cuda/copy.cu"
#include "cuda/copy_handlers.cc"
#include "cuda/device.cc"
#include "cuda/direct.cu"
#include "cuda/ferry.cc"
#include "cuda/ferry_handlers.cc"
#include "cuda/gather.cu"
#include "cuda/library.cc"
#include "cuda/matmul_handlers.cc"
#include "cuda/row_store.cu"
#include "handlers.cc"
#include "runtime.cc"
#include "threads.cc"
