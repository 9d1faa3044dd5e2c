// Argument checks of the operations that only copy.
#include "common/buffers.h"
#include "common/checks.h"

namespace jaxferry {

namespace {

ffi::Error CheckCount(const char* operation, const char* name, size_t size, size_t num_arrays) {
  if (size == num_arrays) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must have one number for each of the " + std::to_string(num_arrays) +
                                " arrays, got " + std::to_string(size));
}

// Checks that the array has the vector's dtype and fits into it at the offset.
ffi::Error CheckPart(const char* operation, const std::string& name, ffi::AnyBuffer array, ffi::AnyBuffer vector,
                     int64_t offset) {
  JAXFERRY_RETURN_IF_ERROR(CheckSameDtype(operation, name.c_str(), array, "the host vector", vector));
  return CheckInside(operation, ("the host vector of " + name).c_str(), vector, offset, array.element_count(), 1);
}

// Likewise; also checks that the dtype is supported.
ffi::Error CheckFloatingPart(const char* operation, const std::string& name, ffi::AnyBuffer array, ffi::AnyBuffer vector,
                             int64_t offset) {
  Dtype dtype;
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(operation, "the host vector", vector, &dtype));
  return CheckPart(operation, name, array, vector, offset);
}

std::string ArrayName(size_t i) { return "array " + std::to_string(i); }

}  // namespace

ffi::Error CheckRead(ffi::AnyBuffer vector, ffi::RemainingRets results, Integers offsets, Copies* copies) {
  const char* operation = "dha_read";
  JAXFERRY_RETURN_IF_ERROR(CheckCount(operation, "offsets", offsets.size(), results.size()));
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::AnyBuffer array = **results.get<ffi::AnyBuffer>(i);
    JAXFERRY_RETURN_IF_ERROR(CheckFloatingPart(operation, ArrayName(i), array, vector, offsets[i]));
    copies->push_back({At(vector, offsets[i]), array.untyped_data(), NumBytes(array), std::nullopt});
  }
  return ffi::Error::Success();
}

ffi::Error CheckFerryLoad(ffi::RemainingArgs arguments, ffi::RemainingRets results, Integers vectors, Integers offsets,
                          int64_t vacant, Copies* copies, Vacancy* vacancy) {
  const char* operation = "ferry_load";
  if (vacant < 0 || vacant > 2) {
    return Invalid(operation, "vacant must be 0, 1 or 2, got " + std::to_string(vacant));
  }
  *vacancy = static_cast<Vacancy>(vacant);
  const size_t num_arrays = results.size();
  if (num_arrays > arguments.size()) {
    return Invalid(operation, "there must be an argument for each of the " + std::to_string(num_arrays) +
                                  " results, got " + std::to_string(arguments.size()));
  }
  const size_t num_vectors = arguments.size() - num_arrays;
  JAXFERRY_RETURN_IF_ERROR(CheckCount(operation, "vectors", vectors.size(), num_arrays));
  JAXFERRY_RETURN_IF_ERROR(CheckCount(operation, "offsets", offsets.size(), num_arrays));
  for (size_t i = 0; i < num_arrays; ++i) {
    if (vectors[i] < 0 || vectors[i] >= static_cast<int64_t>(num_vectors)) {
      return Invalid(operation, "vectors[" + std::to_string(i) + "] must lie in [0, " + std::to_string(num_vectors) +
                                    "), got " + std::to_string(vectors[i]));
    }
    ffi::AnyBuffer vector = *arguments.get<ffi::AnyBuffer>(vectors[i]);
    ffi::AnyBuffer array = *arguments.get<ffi::AnyBuffer>(num_vectors + i);
    ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(i);
    JAXFERRY_RETURN_IF_ERROR(CheckPart(operation, ArrayName(i), array, vector, offsets[i]));
    JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, ArrayName(i).c_str(), array, result));
    copies->push_back({At(vector, offsets[i]), array.untyped_data(), NumBytes(array), std::nullopt});
  }
  return ffi::Error::Success();
}

ffi::Error CheckFerryStore(ffi::RemainingArgs arguments, ffi::AnyBuffer result, Integers offsets, int64_t accumulate,
                           Copies* copies) {
  const char* operation = "ferry_store";
  if (arguments.size() == 0) return Invalid(operation, "there must be a host vector as the last argument, got none");
  const size_t num_arrays = arguments.size() - 1;
  ffi::AnyBuffer vector = *arguments.get<ffi::AnyBuffer>(num_arrays);
  bool add = false;
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(operation, "accumulate", accumulate, &add));
  JAXFERRY_RETURN_IF_ERROR(CheckCount(operation, "offsets", offsets.size(), num_arrays));
  JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, "the host vector", vector, result));
  for (size_t i = 0; i < num_arrays; ++i) {
    ffi::AnyBuffer array = *arguments.get<ffi::AnyBuffer>(i);
    JAXFERRY_RETURN_IF_ERROR(CheckFloatingPart(operation, ArrayName(i), array, vector, offsets[i]));
    copies->push_back(
        {array.untyped_data(), At(vector, offsets[i]), NumBytes(array), add ? FindDtype(vector) : std::nullopt});
  }
  return ffi::Error::Success();
}

ffi::Error CheckInPlace(const char* operation, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        Ranges* ranges) {
  if (arguments.size() != results.size()) {
    return Invalid(operation, "there must be a result for each argument, got " + std::to_string(results.size()) +
                                  " for " + std::to_string(arguments.size()));
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    ffi::AnyBuffer argument = *arguments.get<ffi::AnyBuffer>(i);
    ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(i);
    JAXFERRY_RETURN_IF_ERROR(CheckAliased(operation, ArrayName(i).c_str(), argument, result));
    ranges->push_back({argument.untyped_data(), NumBytes(argument)});
  }
  return ffi::Error::Success();
}

ffi::Error CheckMark(ffi::RemainingArgs arguments, int64_t queue, const void** token, MarkQueue* which) {
  const char* operation = "mark";
  if (arguments.size() == 0) return Invalid(operation, "there must be a token as the first argument, got none");
  if (queue < 0 || queue > static_cast<int64_t>(MarkQueue::kStores)) {
    return Invalid(operation, "queue must be 0 (the program), 1 (loads) or 2 (stores), got " + std::to_string(queue));
  }
  *token = arguments.get<ffi::AnyBuffer>(0)->untyped_data();
  *which = static_cast<MarkQueue>(queue);
  return ffi::Error::Success();
}

}  // namespace jaxferry
