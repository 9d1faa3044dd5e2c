// Copies parts of a host vector into separate arrays.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/copy.h"
#include "cpu/emulated_time.h"

namespace jaxferry {

static ffi::Error DhaRead(ffi::AnyBuffer vector, ffi::RemainingRets results, Integers offsets) {
  return Guarded("dha_read", [&] {
    Copies copies;
    JAXFERRY_RETURN_IF_ERROR(CheckRead(vector, results, offsets, &copies));
    int64_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    const EmulatedTime reading(kLoad, bytes);
    for (const Copy& copy : copies) RunCopy(copy);
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_read, DhaRead,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // vector
                                  .RemainingRets()        // arrays
                                  .Attr<Integers>("offsets"));

}  // namespace jaxferry
