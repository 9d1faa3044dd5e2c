// Handlers of the products with, and the gradients of, a weight in host memory.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/blas.h"
#include "cpu/dha_matmul.h"
#include "cpu/emulated_time.h"

namespace jaxferry {

// sgemm counts in 32 bits, so no row of a matrix may be longer; the products themselves are cut to size.
static ffi::Error CheckBlas(const char* operation, int64_t k, int64_t n) {
  constexpr int64_t kLongestRow = (int64_t{1} << 31) - 1;
  if (!HasBlas()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      std::string(operation) + ": there is no BLAS yet: call jaxferry_set_blas first");
  }
  if (k <= kLongestRow && n <= kLongestRow) return ffi::Error::Success();
  return Invalid(operation, "k and n must be below 2^31 on the CPU, got k = " + std::to_string(k) +
                                " and n = " + std::to_string(n));
}

static ffi::Error DhaMatmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scratch, ffi::Result<ffi::AnyBuffer> y,
                            int64_t offset, int64_t k, int64_t n, int64_t transpose) {
  return Guarded("dha_matmul", [&] {
    Matmul call;
    JAXFERRY_RETURN_IF_ERROR(CheckMatmul(x, w, scratch, *y, offset, k, n, transpose, &call));
    JAXFERRY_RETURN_IF_ERROR(CheckBlas("dha_matmul", k, n));
    const EmulatedTime reading(kLoad, call.k * call.n * ItemSize(call.w_dtype));
    RunMatmul(call);
    return ffi::Error::Success();
  });
}

static ffi::Error DhaMatmulGradient(ffi::AnyBuffer destination, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                    ffi::AnyBuffer scratch, ffi::Result<ffi::AnyBuffer> result, int64_t offset,
                                    int64_t k, int64_t n, int64_t transpose, int64_t accumulate, int64_t round_to) {
  return Guarded("dha_matmul_gradient", [&] {
    MatmulGradient call;
    JAXFERRY_RETURN_IF_ERROR(CheckMatmulGradient(destination, x, dy, scratch, *result, offset, k, n, transpose,
                                                 accumulate, round_to, &call));
    JAXFERRY_RETURN_IF_ERROR(CheckBlas("dha_matmul_gradient", k, n));
    const EmulatedTime writing(kStore, call.k * call.n * ItemSize(call.destination_dtype));
    RunMatmulGradient(call);
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_matmul, DhaMatmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // w
                                  .Arg<ffi::AnyBuffer>()  // scratch
                                  .Ret<ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("transpose"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_matmul_gradient, DhaMatmulGradient,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // destination
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // dy
                                  .Arg<ffi::AnyBuffer>()  // scratch
                                  .Ret<ffi::AnyBuffer>()  // destination
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("transpose")
                                  .Attr<int64_t>("accumulate")
                                  .Attr<int64_t>("round_to"));

}  // namespace jaxferry
