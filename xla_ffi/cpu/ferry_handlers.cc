// Handlers that queue copies, one that waits for the copies of its arguments, and one that has nothing to note here.
#include <utility>

#include "common/checks.h"
#include "common/exports.h"
#include "cpu/ferry.h"
#include "cpu/marks.h"

namespace jaxferry {

static ffi::Error Push(const char* operation, Direction direction, Copies copies) {
  if (Ferry::Get().queue(direction).Push(std::move(copies))) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kCancelled, std::string(operation) + ": the process is about to exit");
}

static ffi::Error FerryLoad(ffi::RemainingArgs arguments, ffi::RemainingRets results, Integers vectors,
                            Integers offsets, int64_t vacant) {
  return Guarded("ferry_load", [&] {
    Copies copies;
    // XLA calls this once its arguments are free and filled, so there is nothing else to wait for.
    Vacancy vacancy;
    JAXFERRY_RETURN_IF_ERROR(CheckFerryLoad(arguments, results, vectors, offsets, vacant, &copies, &vacancy));
    return Push("ferry_load", kLoad, std::move(copies));
  });
}

static ffi::Error FerryStore(ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result, Integers offsets,
                             int64_t accumulate) {
  return Guarded("ferry_store", [&] {
    Copies copies;
    JAXFERRY_RETURN_IF_ERROR(CheckFerryStore(arguments, *result, offsets, accumulate, &copies));
    return Push("ferry_store", kStore, std::move(copies));
  });
}

static ffi::Future FerryWait(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const ffi::Error error = Guarded("ferry_wait", [&] {
    Ranges ranges;
    JAXFERRY_RETURN_IF_ERROR(CheckInPlace("ferry_wait", arguments, results, &ranges));
    Ferry::Get().CallWhenDone(ranges, [promise]() mutable {
      Marks::Get().NoteEndOfWait();
      NoteEnded();
      promise.SetAvailable();
    });
    return ffi::Error::Success();
  });
  if (error.failure()) promise.SetError(error);
  return future;
}

static ffi::Error FerryVacate(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return Guarded("ferry_vacate", [&] {
    Ranges ranges;
    return CheckInPlace("ferry_vacate", arguments, results, &ranges);
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_load, FerryLoad,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()  // host vectors, then device arrays
                                  .RemainingRets()  // device arrays
                                  .Attr<Integers>("vectors")
                                  .Attr<Integers>("offsets")
                                  .Attr<int64_t>("vacant"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_store, FerryStore,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()        // device arrays, then a host vector
                                  .Ret<ffi::AnyBuffer>()  // host vector
                                  .Attr<Integers>("offsets")
                                  .Attr<int64_t>("accumulate"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_wait, FerryWait,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()    // arrays
                                  .RemainingRets());  // the same

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_ferry_vacate, FerryVacate,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()    // arrays
                                  .RemainingRets());  // the same

}  // namespace jaxferry
