#include "common/buffers.h"

namespace jaxferry {

namespace {

// A dtype as NumPy names it, and the bits of an element. XLA packs elements of fewer than 8 bits, the first one lowest.
struct Known {
  ffi::DataType dtype;
  const char* name;
  int64_t bits;
};

// XLA's own ByteWidth says a byte for each of them.
constexpr Known kKnown[] = {
    {ffi::DataType::PRED, "bool", 8},
    {ffi::DataType::S1, "int1", 1},
    {ffi::DataType::S2, "int2", 2},
    {ffi::DataType::S4, "int4", 4},
    {ffi::DataType::S8, "int8", 8},
    {ffi::DataType::S16, "int16", 16},
    {ffi::DataType::S32, "int32", 32},
    {ffi::DataType::S64, "int64", 64},
    {ffi::DataType::U1, "uint1", 1},
    {ffi::DataType::U2, "uint2", 2},
    {ffi::DataType::U4, "uint4", 4},
    {ffi::DataType::U8, "uint8", 8},
    {ffi::DataType::U16, "uint16", 16},
    {ffi::DataType::U32, "uint32", 32},
    {ffi::DataType::U64, "uint64", 64},
    {ffi::DataType::F4E2M1FN, "float4_e2m1fn", 4},
    {ffi::DataType::F8E3M4, "float8_e3m4", 8},
    {ffi::DataType::F8E4M3, "float8_e4m3", 8},
    {ffi::DataType::F8E4M3B11FNUZ, "float8_e4m3b11fnuz", 8},
    {ffi::DataType::F8E4M3FN, "float8_e4m3fn", 8},
    {ffi::DataType::F8E4M3FNUZ, "float8_e4m3fnuz", 8},
    {ffi::DataType::F8E5M2, "float8_e5m2", 8},
    {ffi::DataType::F8E5M2FNUZ, "float8_e5m2fnuz", 8},
    {ffi::DataType::F8E8M0FNU, "float8_e8m0fnu", 8},
    {ffi::DataType::F16, "float16", 16},
    {ffi::DataType::BF16, "bfloat16", 16},
    {ffi::DataType::F32, "float32", 32},
    {ffi::DataType::F64, "float64", 64},
    {ffi::DataType::C64, "complex64", 64},
    {ffi::DataType::C128, "complex128", 128},
};

const Known* Find(const ffi::AnyBuffer& buffer) {
  for (const Known& known : kKnown) {
    if (known.dtype == buffer.element_type()) return &known;
  }
  return nullptr;
}

// The bits of an element; 0 for an unknown dtype, of which the checks refuse all buffers.
int64_t BitsOf(const ffi::AnyBuffer& buffer) {
  const Known* known = Find(buffer);
  return known != nullptr ? known->bits : 0;
}

}  // namespace

std::string Describe(const ffi::AnyBuffer& buffer) {
  const Known* known = Find(buffer);
  std::string text = known != nullptr ? known->name : "dtype " + std::to_string(static_cast<int>(buffer.element_type()));
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

ffi::Error CheckKnown(const char* operation, const char* name, const ffi::AnyBuffer& buffer) {
  if (Find(buffer) != nullptr) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must have a dtype whose size is known, got " + Describe(buffer));
}

ffi::Error CheckInside(const char* operation, const char* name, const ffi::AnyBuffer& vector, int64_t offset,
                       int64_t rows, int64_t columns) {
  JAXFERRY_RETURN_IF_ERROR(CheckKnown(operation, name, vector));
  const int64_t size = vector.element_count();
  // Divides, because a product of two attributes may exceed 64 bits.
  const bool fits =
      offset >= 0 && offset <= size && rows >= 0 && columns >= 0 && (columns == 0 || rows <= (size - offset) / columns);
  if (fits && (offset % 8) * BitsOf(vector) % 8 == 0) return ffi::Error::Success();
  if (fits) {
    return Invalid(operation, "element " + std::to_string(offset) + " of " + name + ", " + Describe(vector) +
                                  ", must be the first one of a byte");
  }
  return Invalid(operation, std::to_string(rows) + " x " + std::to_string(columns) + " elements from offset " +
                                std::to_string(offset) + " on do not lie inside " + name + ", " + Describe(vector));
}

ffi::Error CheckAliased(const char* operation, const char* name, const ffi::AnyBuffer& argument,
                        const ffi::AnyBuffer& result) {
  if (argument.element_type() != result.element_type() || !(argument.dimensions() == result.dimensions())) {
    return Invalid(operation, std::string("the result for ") + name + " must have its dtype and shape, got " +
                                  Describe(argument) + " and " + Describe(result));
  }
  JAXFERRY_RETURN_IF_ERROR(CheckKnown(operation, name, argument));
  if (NumBytes(argument) == 0 || argument.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return Invalid(operation, std::string("the result for ") + name + ", " + Describe(argument) +
                                ", must alias it: pass input_output_aliases and donate the argument");
}

int64_t NumBytes(const ffi::AnyBuffer& buffer) {
  return (static_cast<int64_t>(buffer.element_count()) * BitsOf(buffer) + 7) / 8;
}

void* At(const ffi::AnyBuffer& vector, int64_t offset) {
  return static_cast<char*>(vector.untyped_data()) + offset / 8 * BitsOf(vector) + offset % 8 * BitsOf(vector) / 8;
}

}  // namespace jaxferry
