// Adds rows, such as the gradient of a lookup, to a table in host memory.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/emulated_time.h"
#include "cpu/host_sums.h"

namespace jaxferry {

static ffi::Error RowStoreHandler(ffi::AnyBuffer destination, ffi::AnyBuffer indices, ffi::AnyBuffer rows_added,
                                  ffi::Result<ffi::AnyBuffer> result, int64_t offset, int64_t rows, int64_t columns) {
  return Guarded("row_store", [&] {
    RowStore call;
    JAXFERRY_RETURN_IF_ERROR(
        CheckRowStore(destination, indices, rows_added, *result, offset, rows, columns, &call));
    const EmulatedTime writing(kStore, call.num_indices * call.columns * ItemSize(call.destination_dtype));
    AddRowsOnHost({call.dtype, call.added, call.indices, call.num_indices, call.columns, call.destination_dtype,
                   call.destination, 0, call.rows * call.columns});
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_row_store, RowStoreHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // destination
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // rows
                                  .Ret<ffi::AnyBuffer>()  // destination
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("columns"));

}  // namespace jaxferry
