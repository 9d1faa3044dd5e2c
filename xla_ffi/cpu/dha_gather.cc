#include "cpu/dha_gather.h"

#include "common/checks.h"
#include "common/exports.h"
#include "cpu/emulated_time.h"

namespace jaxferry {

static ffi::Error DhaGather(ffi::AnyBuffer table, ffi::AnyBuffer indices, ffi::AnyBuffer scratch,
                            ffi::Result<ffi::AnyBuffer> result, int64_t offset, int64_t rows, int64_t columns) {
  return Guarded("dha_gather", [&] {
    Gather call;
    JAXFERRY_RETURN_IF_ERROR(CheckGather(table, indices, scratch, *result, offset, rows, columns, &call));
    const EmulatedTime reading(kLoad, call.num_indices * call.columns * ItemSize(call.dtype));
    RunGather(call);
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_gather, DhaGather,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // table
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // scratch
                                  .Ret<ffi::AnyBuffer>()  // rows
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("columns"));

}  // namespace jaxferry
