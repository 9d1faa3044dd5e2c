// Handlers of the products with, and the gradients of, a weight in host memory.
#include "cuda/handler.h"
#include "cuda/location.h"
#include "cuda/operations.h"

namespace jaxferry {

static ffi::Error DhaMatmul(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer w,
                            ffi::AnyBuffer scratch, ffi::Result<ffi::AnyBuffer> y, int64_t offset, int64_t k, int64_t n,
                            int64_t transpose) {
  return Guarded("dha_matmul", [&] {
    Matmul call;
    JAXFERRY_RETURN_IF_ERROR(CheckMatmul(x, w, scratch, *y, offset, k, n, transpose, &call));
    return cuda::RunOn("dha_matmul", ordinal, {{"x", x}, {"w", w}, {"scratch", scratch}, {"result", *y}},
                       [&](cuda::Device& device) {
                         cuda::CheckReachable(call.w, call.k * call.n, "w");
                         cuda::RunMatmul(device, call, stream);
                       });
  });
}

static ffi::Error DhaMatmulGradient(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer destination, ffi::AnyBuffer x,
                                    ffi::AnyBuffer dy, ffi::AnyBuffer scratch, ffi::Result<ffi::AnyBuffer> result,
                                    int64_t offset, int64_t k, int64_t n, int64_t transpose, int64_t accumulate,
                                    int64_t round_to) {
  return Guarded("dha_matmul_gradient", [&] {
    MatmulGradient call;
    JAXFERRY_RETURN_IF_ERROR(CheckMatmulGradient(destination, x, dy, scratch, *result, offset, k, n, transpose,
                                                 accumulate, round_to, &call));
    return cuda::RunOn("dha_matmul_gradient", ordinal,
                       {{"destination", destination}, {"x", x}, {"dy", dy}, {"scratch", scratch}},
                       [&](cuda::Device& device) {
                         cuda::CheckReachable(call.destination, call.k * call.n, "the destination");
                         cuda::RunMatmulGradient(device, call, stream);
                       });
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_matmul, DhaMatmul,
                              JAXFERRY_BIND()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // w
                                  .Arg<ffi::AnyBuffer>()  // scratch
                                  .Ret<ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("transpose"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_matmul_gradient, DhaMatmulGradient,
                              JAXFERRY_BIND()
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

// Sizes of a product: dtypes of x, w and y, bytes of scratch, m, k, n, pitches of x and y, transpose. Those of a
// gradient: dtypes of x and of the destination, bytes of scratch, m, k, n, pitches of x and dy, transpose, accumulate,
// round_to.
int64_t jaxferry_plan_product(int ordinal, int is_gradient, const int64_t* sizes) {
  using jaxferry::Dtype;
  const auto dtype = [&](int place) { return static_cast<Dtype>(sizes[place]); };
  try {
    const jaxferry::cuda::CurrentDevice current(ordinal);
    jaxferry::cuda::Device& device = jaxferry::cuda::Device::Get(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    if (is_gradient) {
      const std::optional<Dtype> round_to = sizes[10] == 0 ? std::nullopt : std::optional(dtype(10));
      jaxferry::cuda::PlanMatmulGradient(
          device, {dtype(0), dtype(1), nullptr, nullptr, nullptr, nullptr, sizes[2], sizes[3], sizes[4], sizes[5],
                   sizes[6], sizes[7], sizes[8] != 0, sizes[9] != 0, round_to});
    } else {
      jaxferry::cuda::PlanMatmul(device, {dtype(0), dtype(1), dtype(2), nullptr, nullptr, nullptr, nullptr, sizes[3],
                                          sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9] != 0});
    }
    return device.multiplier.num_plans();
  } catch (const std::exception&) {
    return -1;
  }
}
