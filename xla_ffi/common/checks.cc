#include "common/checks.h"

#include "common/buffers.h"

namespace jaxferry {

namespace {

ffi::Error CheckScratch(const char* operation, ffi::AnyBuffer scratch) {
  if (scratch.element_type() == ffi::DataType::U8) return ffi::Error::Success();
  return Invalid(operation, "scratch must be uint8, got " + Describe(scratch));
}

// Checks that there is a row `[columns]` for each index.
ffi::Error CheckRows(const char* operation, const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer indices,
                     int64_t columns) {
  if (indices.element_type() != ffi::DataType::S32) {
    return Invalid(operation, "indices must be int32, got " + Describe(indices));
  }
  int64_t num_rows = 0;
  JAXFERRY_RETURN_IF_ERROR(CheckMatrix(operation, name, buffer, "columns", columns, &num_rows));
  if (num_rows == static_cast<int64_t>(indices.element_count())) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must have a row for each index, got " + Describe(buffer) +
                                " for indices " + Describe(indices));
}

}  // namespace

ffi::Error CheckGather(ffi::AnyBuffer table, ffi::AnyBuffer indices, ffi::AnyBuffer scratch, ffi::AnyBuffer result,
                       int64_t offset, int64_t rows, int64_t columns, Gather* call) {
  const char* operation = "dha_gather";
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "table", table, &call->dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckInside(operation, "table", table, offset, rows, columns));
  JAXFERRY_RETURN_IF_ERROR(CheckSameDtype(operation, "the result", result, "table", table));
  JAXFERRY_RETURN_IF_ERROR(CheckRows(operation, "the result", result, indices, columns));
  JAXFERRY_RETURN_IF_ERROR(CheckScratch(operation, scratch));
  if (static_cast<int64_t>(scratch.element_count()) / 4 < rows) {
    return Invalid(operation, "scratch must have four bytes for each of " + std::to_string(rows) + " rows, got " +
                                  Describe(scratch));
  }
  call->scratch = scratch.untyped_data();
  call->num_indices = indices.element_count();
  call->table = At(table, offset);
  call->indices = static_cast<const int32_t*>(indices.untyped_data());
  call->result = result.untyped_data();
  call->rows = rows;
  call->columns = columns;
  return ffi::Error::Success();
}

ffi::Error CheckRowStore(ffi::AnyBuffer destination, ffi::AnyBuffer indices, ffi::AnyBuffer added,
                         ffi::AnyBuffer result, int64_t offset, int64_t rows, int64_t columns, RowStore* call) {
  const char* operation = "row_store";
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "destination", destination, &call->destination_dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "rows", added, &call->dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckInside(operation, "destination", destination, offset, rows, columns));
  JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, "destination", destination, result));
  JAXFERRY_RETURN_IF_ERROR(CheckRows(operation, "rows", added, indices, columns));
  call->num_indices = indices.element_count();
  call->indices = static_cast<const int32_t*>(indices.untyped_data());
  call->added = added.untyped_data();
  call->destination = At(destination, offset);
  call->rows = rows;
  call->columns = columns;
  return ffi::Error::Success();
}

namespace {

// Checks that the buffer has rows of `columns` numbers, which may be padded to a multiple of eight, and stores the number
// of rows and their size with the padding.
ffi::Error CheckPadded(const char* operation, const char* name, ffi::AnyBuffer buffer, const char* columns_name,
                       int64_t columns, int64_t* rows, int64_t* pitch) {
  const ffi::AnyBuffer::Dimensions dimensions = buffer.dimensions();
  const int64_t padded = (columns + 7) / 8 * 8;
  *pitch = dimensions.size() != 0 && dimensions.back() == padded ? padded : columns;
  return CheckMatrix(operation, name, buffer, columns_name, *pitch, rows);
}

ffi::Error CheckSameRows(const char* operation, const char* names, int64_t rows, int64_t other_rows,
                         ffi::AnyBuffer buffer, ffi::AnyBuffer other) {
  if (rows == other_rows) return ffi::Error::Success();
  return Invalid(operation,
                 std::string(names) + " must have as many rows, got " + Describe(buffer) + " and " + Describe(other));
}

}  // namespace

ffi::Error CheckMatmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scratch, ffi::AnyBuffer y, int64_t offset,
                       int64_t k, int64_t n, int64_t transpose, Matmul* call) {
  const char* operation = "dha_matmul";
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "x", x, &call->x_dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "w", w, &call->w_dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "the result", y, &call->y_dtype));
  if (call->y_dtype != call->x_dtype && call->y_dtype != Dtype::kFloat32) {
    return Invalid(operation,
                   "the result must be float32 or have the dtype of x, got " + Describe(y) + " and " + Describe(x));
  }
  JAXFERRY_RETURN_IF_ERROR(CheckScratch(operation, scratch));
  JAXFERRY_RETURN_IF_ERROR(CheckInside(operation, "w", w, offset, k, n));
  int64_t result_rows = 0;
  JAXFERRY_RETURN_IF_ERROR(CheckPadded(operation, "x", x, "k", k, &call->m, &call->x_pitch));
  JAXFERRY_RETURN_IF_ERROR(CheckPadded(operation, "the result", y, "n", n, &result_rows, &call->y_pitch));
  JAXFERRY_RETURN_IF_ERROR(CheckSameRows(operation, "x and the result", call->m, result_rows, x, y));
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(operation, "transpose", transpose, &call->transpose));
  call->x = x.untyped_data();
  call->w = At(w, offset);
  call->y = y.untyped_data();
  call->scratch = scratch.untyped_data();
  call->scratch_bytes = scratch.element_count();
  call->k = k;
  call->n = n;
  return ffi::Error::Success();
}

ffi::Error CheckMatmulGradient(ffi::AnyBuffer destination, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::AnyBuffer scratch,
                               ffi::AnyBuffer result, int64_t offset, int64_t k, int64_t n, int64_t transpose,
                               int64_t accumulate, int64_t round_to, MatmulGradient* call) {
  const char* operation = "dha_matmul_gradient";
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "destination", destination, &call->destination_dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "x", x, &call->dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckSameDtype(operation, "dy", dy, "x", x));
  JAXFERRY_RETURN_IF_ERROR(CheckScratch(operation, scratch));
  JAXFERRY_RETURN_IF_ERROR(CheckInside(operation, "destination", destination, offset, k, n));
  int64_t dy_rows = 0;
  JAXFERRY_RETURN_IF_ERROR(CheckPadded(operation, "x", x, "k", k, &call->m, &call->x_pitch));
  JAXFERRY_RETURN_IF_ERROR(CheckPadded(operation, "dy", dy, "n", n, &dy_rows, &call->dy_pitch));
  JAXFERRY_RETURN_IF_ERROR(CheckSameRows(operation, "x and dy", call->m, dy_rows, x, dy));
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(operation, "transpose", transpose, &call->transpose));
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(operation, "accumulate", accumulate, &call->accumulate));
  if (round_to < 0 || round_to > 2) {
    return Invalid(operation, "round_to must be 0, 1 or 2, got " + std::to_string(round_to));
  }
  JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, "destination", destination, result));
  call->round_to.reset();
  if (round_to != 0) call->round_to = round_to == 1 ? Dtype::kBfloat16 : Dtype::kFloat16;
  call->x = x.untyped_data();
  call->dy = dy.untyped_data();
  call->destination = At(destination, offset);
  call->scratch = scratch.untyped_data();
  call->scratch_bytes = scratch.element_count();
  call->k = k;
  call->n = n;
  return ffi::Error::Success();
}

ffi::Error CheckStore(ffi::AnyBuffer destination, ffi::AnyBuffer gradient, ffi::AnyBuffer result, int64_t offset,
                      int64_t accumulate, Store* call) {
  const char* operation = "gradient_store";
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "destination", destination, &call->destination_dtype));
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "gradient", gradient, &call->dtype));
  call->size = gradient.element_count();
  JAXFERRY_RETURN_IF_ERROR(CheckInside(operation, "destination", destination, offset, call->size, 1));
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(operation, "accumulate", accumulate, &call->accumulate));
  JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, "destination", destination, result));
  call->gradient = gradient.untyped_data();
  call->destination = At(destination, offset);
  return ffi::Error::Success();
}

}  // namespace jaxferry
