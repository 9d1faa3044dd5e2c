// Adds rows, such as the gradient of a lookup, to a table in host memory.
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/convert.h"
#include "cpu/emulated_time.h"

namespace jaxferry {

static void RunRowStore(const RowStore& call) {
  const int64_t stride = call.columns * ItemSize(call.destination_dtype);
  const char* row = static_cast<const char*>(call.added);
  for (int64_t i = 0; i < call.num_indices; ++i, row += call.columns * ItemSize(call.dtype)) {
    if (call.indices[i] < 0 || call.indices[i] >= call.rows) continue;
    char* destination = static_cast<char*>(call.destination) + call.indices[i] * stride;
    Add(call.dtype, row, call.destination_dtype, destination, call.columns);
  }
}

static ffi::Error RowStoreHandler(ffi::AnyBuffer destination, ffi::AnyBuffer indices, ffi::AnyBuffer rows_added,
                                  ffi::Result<ffi::AnyBuffer> result, int64_t offset, int64_t rows, int64_t columns) {
  return Guarded("row_store", [&] {
    RowStore call;
    JAXFERRY_RETURN_IF_ERROR(
        CheckRowStore(destination, indices, rows_added, *result, offset, rows, columns, &call));
    const EmulatedTime writing(kStore, call.num_indices * call.columns * ItemSize(call.destination_dtype));
    RunRowStore(call);
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
