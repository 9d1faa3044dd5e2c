// Handlers of the operations that look up, read and store.
#include "cuda/handler.h"
#include "cuda/kernels.h"
#include "cuda/location.h"
#include "cuda/operations.h"

namespace jaxferry {

static ffi::Error DhaGather(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer table, ffi::AnyBuffer indices,
                            ffi::AnyBuffer scratch, ffi::Result<ffi::AnyBuffer> result, int64_t offset, int64_t rows,
                            int64_t columns) {
  return Guarded("dha_gather", [&] {
    Gather call;
    JAXFERRY_RETURN_IF_ERROR(CheckGather(table, indices, scratch, *result, offset, rows, columns, &call));
    return cuda::RunOn("dha_gather", ordinal, {{"table", table}, {"indices", indices}}, [&](cuda::Device&) {
      cuda::CheckReachable(call.table, call.rows * call.columns, "the table");
      cuda::GatherRows(call, stream);
    });
  });
}

static ffi::Error DhaRead(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer vector, ffi::RemainingRets results,
                          Integers offsets) {
  return Guarded("dha_read", [&] {
    Copies copies;
    JAXFERRY_RETURN_IF_ERROR(CheckRead(vector, results, offsets, &copies));
    return cuda::RunOn("dha_read", ordinal, {{"vector", vector}}, [&](cuda::Device&) {
      cuda::CheckReachable(vector.untyped_data(), vector.element_count(), "the vector");
      cuda::RunRead(copies, stream);
    });
  });
}

static ffi::Error GradientStore(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer destination,
                                ffi::AnyBuffer gradient, ffi::Result<ffi::AnyBuffer> result, int64_t offset,
                                int64_t accumulate) {
  return Guarded("gradient_store", [&] {
    Store call;
    JAXFERRY_RETURN_IF_ERROR(CheckStore(destination, gradient, *result, offset, accumulate, &call));
    return cuda::RunOn("gradient_store", ordinal, {{"destination", destination}, {"gradient", gradient}},
                       [&](cuda::Device&) {
                         cuda::CheckReachable(call.destination, call.size, "the destination");
                         cuda::RunStore(call, stream);
                       });
  });
}

static ffi::Error RowStoreHandler(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer destination,
                                  ffi::AnyBuffer indices, ffi::AnyBuffer added, ffi::Result<ffi::AnyBuffer> result,
                                  int64_t offset, int64_t rows, int64_t columns) {
  return Guarded("row_store", [&] {
    RowStore call;
    JAXFERRY_RETURN_IF_ERROR(CheckRowStore(destination, indices, added, *result, offset, rows, columns, &call));
    return cuda::RunOn("row_store", ordinal, {{"destination", destination}, {"indices", indices}, {"rows", added}},
                       [&](cuda::Device&) {
                         cuda::CheckReachable(call.destination, call.rows * call.columns, "the destination");
                         cuda::AddRows(call, stream);
                       });
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_gather, DhaGather,
                              JAXFERRY_BIND()
                                  .Arg<ffi::AnyBuffer>()  // table
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // scratch
                                  .Ret<ffi::AnyBuffer>()  // rows
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_dha_read, DhaRead,
                              JAXFERRY_BIND()
                                  .Arg<ffi::AnyBuffer>()  // vector
                                  .RemainingRets()        // arrays
                                  .Attr<Integers>("offsets"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_gradient_store, GradientStore,
                              JAXFERRY_BIND()
                                  .Arg<ffi::AnyBuffer>()  // destination
                                  .Arg<ffi::AnyBuffer>()  // gradient
                                  .Ret<ffi::AnyBuffer>()  // destination
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("accumulate"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_row_store, RowStoreHandler,
                              JAXFERRY_BIND()
                                  .Arg<ffi::AnyBuffer>()  // destination
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // rows
                                  .Ret<ffi::AnyBuffer>()  // destination
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("columns"));

}  // namespace jaxferry
