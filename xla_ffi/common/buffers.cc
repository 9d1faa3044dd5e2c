#include "common/buffers.h"

namespace jaxferry {

namespace {

// NumPy's name for an XLA dtype.
const char* NameOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return "bool";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::S16:
      return "int16";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U16:
      return "uint16";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::U64:
      return "uint64";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F64:
      return "float64";
    default:
      return nullptr;
  }
}

}  // namespace

std::string Describe(const ffi::AnyBuffer& buffer) {
  const char* name = NameOf(buffer.element_type());
  std::string text = name != nullptr ? name : "dtype " + std::to_string(static_cast<int>(buffer.element_type()));
  text += "[";
  for (size_t axis = 0; axis < buffer.dimensions().size(); ++axis) {
    text += (axis == 0 ? "" : ",") + std::to_string(buffer.dimensions()[axis]);
  }
  return text + "]";
}

ffi::Error Invalid(const char* operation, const std::string& message) {
  return ffi::Error::InvalidArgument(std::string(operation) + ": " + message);
}

std::optional<Dtype> FindDtype(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return Dtype::kFloat32;
    case ffi::DataType::BF16:
      return Dtype::kBfloat16;
    case ffi::DataType::F16:
      return Dtype::kFloat16;
    default:
      return std::nullopt;
  }
}

ffi::Error CheckFloating(const char* operation, const char* name, const ffi::AnyBuffer& buffer, Dtype* dtype) {
  const std::optional<Dtype> found = FindDtype(buffer);
  if (!found) {
    return Invalid(operation, std::string(name) + " must be float32, bfloat16 or float16, got " + Describe(buffer));
  }
  *dtype = *found;
  return ffi::Error::Success();
}

ffi::Error CheckFlag(const char* operation, const char* name, int64_t value, bool* flag) {
  if (value != 0 && value != 1) {
    return Invalid(operation, std::string(name) + " must be 0 or 1, got " + std::to_string(value));
  }
  *flag = value == 1;
  return ffi::Error::Success();
}

ffi::Error CheckSameDtype(const char* operation, const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                          const ffi::AnyBuffer& other) {
  if (buffer.element_type() == other.element_type()) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must have the dtype of " + other_name + ", got " + Describe(buffer) +
                                " and " + Describe(other));
}

ffi::Error CheckMatrix(const char* operation, const char* name, const ffi::AnyBuffer& buffer, const char* columns_name,
                       int64_t columns, int64_t* rows) {
  const ffi::AnyBuffer::Dimensions dimensions = buffer.dimensions();
  if (dimensions.size() == 0 || dimensions.back() != columns) {
    return Invalid(operation, std::string(name) + " must have " + columns_name + " = " + std::to_string(columns) +
                                  " as its last dimension, got " + Describe(buffer));
  }
  *rows = 1;
  for (size_t axis = 0; axis + 1 < dimensions.size(); ++axis) *rows *= dimensions[axis];
  return ffi::Error::Success();
}

ffi::Error CheckInside(const char* operation, const char* name, const ffi::AnyBuffer& vector, int64_t offset,
                       int64_t rows, int64_t columns) {
  const int64_t size = vector.element_count();
  // Divides, because a product of two attributes may exceed 64 bits.
  const bool fits =
      offset >= 0 && offset <= size && rows >= 0 && columns >= 0 && (columns == 0 || rows <= (size - offset) / columns);
  if (fits) return ffi::Error::Success();
  return Invalid(operation, std::to_string(rows) + " x " + std::to_string(columns) + " elements from offset " +
                                std::to_string(offset) + " on do not lie inside " + name + ", " + Describe(vector));
}

ffi::Error CheckAliased(const char* operation, const char* name, const ffi::AnyBuffer& argument,
                        const ffi::AnyBuffer& result) {
  if (argument.element_type() != result.element_type() || !(argument.dimensions() == result.dimensions())) {
    return Invalid(operation, std::string("the result for ") + name + " must have its dtype and shape, got " +
                                  Describe(argument) + " and " + Describe(result));
  }
  if (argument.size_bytes() == 0 || argument.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return Invalid(operation, std::string("the result for ") + name + ", " + Describe(argument) +
                                ", must alias it: pass input_output_aliases and donate the argument");
}

void* At(const ffi::AnyBuffer& vector, int64_t offset) {
  const int64_t item_size = static_cast<int64_t>(ffi::ByteWidth(vector.element_type()));
  return static_cast<char*>(vector.untyped_data()) + offset * item_size;
}

}  // namespace jaxferry
