// Handlers that queue copies, one that makes the stream wait for the copies of its arguments, and one that notes that
// nothing reads its arguments any more.
#include "cuda/handler.h"
#include "cuda/location.h"
#include "cuda/operations.h"

namespace jaxferry {

static ffi::Error FerryLoad(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, Integers vectors, Integers offsets, int64_t vacant) {
  return Guarded("ferry_load", [&] {
    Copies copies;
    Vacancy vacancy;
    JAXFERRY_RETURN_IF_ERROR(CheckFerryLoad(arguments, results, vectors, offsets, vacant, &copies, &vacancy));
    return cuda::RunOn("ferry_load", ordinal, {}, [&](cuda::Device& device) {
      cuda::CheckLoads(copies);
      cuda::RunFerryLoad(device, copies, vacancy, stream);
    });
  });
}

static ffi::Error FerryStore(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs arguments,
                             ffi::Result<ffi::AnyBuffer> result, Integers offsets, int64_t accumulate) {
  return Guarded("ferry_store", [&] {
    Copies copies;
    JAXFERRY_RETURN_IF_ERROR(CheckFerryStore(arguments, *result, offsets, accumulate, &copies));
    return cuda::RunOn("ferry_store", ordinal, {{"the host vector", *result}}, [&](cuda::Device& device) {
      cuda::CheckStores(copies);
      cuda::RunFerryStore(device, copies, stream);
    });
  });
}

static ffi::Error FerryWait(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results) {
  return Guarded("ferry_wait", [&] {
    Ranges ranges;
    JAXFERRY_RETURN_IF_ERROR(CheckInPlace("ferry_wait", arguments, results, &ranges));
    return cuda::RunOn("ferry_wait", ordinal, {},
                       [&](cuda::Device& device) { cuda::RunFerryWait(device, ranges, stream); });
  });
}

static ffi::Error FerryVacate(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs arguments,
                              ffi::RemainingRets results) {
  return Guarded("ferry_vacate", [&] {
    Ranges ranges;
    JAXFERRY_RETURN_IF_ERROR(CheckInPlace("ferry_vacate", arguments, results, &ranges));
    return cuda::RunOn("ferry_vacate", ordinal, {},
                       [&](cuda::Device& device) { cuda::RunFerryVacate(device, ranges, stream); });
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_load, FerryLoad,
                              JAXFERRY_BIND()
                                  .RemainingArgs()  // host vectors, then device arrays
                                  .RemainingRets()  // device arrays
                                  .Attr<Integers>("vectors")
                                  .Attr<Integers>("offsets")
                                  .Attr<int64_t>("vacant"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_store, FerryStore,
                              JAXFERRY_BIND()
                                  .RemainingArgs()        // device arrays, then a host vector
                                  .Ret<ffi::AnyBuffer>()  // host vector
                                  .Attr<Integers>("offsets")
                                  .Attr<int64_t>("accumulate"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_wait, FerryWait,
                              JAXFERRY_BIND()
                                  .RemainingArgs()    // arrays
                                  .RemainingRets());  // the same

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_vacate, FerryVacate,
                              JAXFERRY_BIND()
                                  .RemainingArgs()    // arrays
                                  .RemainingRets());  // the same

}  // namespace jaxferry
