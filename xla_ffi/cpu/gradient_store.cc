// Writes a gradient into a host vector, or adds it to the vector's contents.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/emulated_time.h"
#include "cpu/host_sums.h"

namespace jaxferry {

static ffi::Error GradientStore(ffi::AnyBuffer destination, ffi::AnyBuffer gradient, ffi::Result<ffi::AnyBuffer> result,
                                int64_t offset, int64_t accumulate) {
  return Guarded("gradient_store", [&] {
    Store call;
    JAXFERRY_RETURN_IF_ERROR(CheckStore(destination, gradient, *result, offset, accumulate, &call));
    const EmulatedTime writing(kStore, call.size * ItemSize(call.destination_dtype));
    const auto store = call.accumulate ? AddOnHost : CastOnHost;
    store(call.dtype, call.gradient, call.destination_dtype, call.destination, call.size);
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_gradient_store, GradientStore,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // destination
                                  .Arg<ffi::AnyBuffer>()  // gradient
                                  .Ret<ffi::AnyBuffer>()  // destination
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("accumulate"));

}  // namespace jaxferry
