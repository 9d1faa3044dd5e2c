// The step's handler: locates the parts of a layer among the operands.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/checks.h"
#include "common/exports.h"
#include "cpu/emulated_time.h"
#include "cpu/host_step.h"

namespace jaxferry {

namespace {

constexpr const char* kHostStep = "host_step";

std::atomic<int64_t> moved_bytes{0};

// Operands in order: factors, gradients [num_vectors], masters [n], moments [n each], copies [num_vectors]. Results:
// masters, moments, copies. Without operands for the copies, the results are freshly allocated. Or in place of copies,
// and without results for them: the addresses of copies with the gradients' sizes, as bytes [8 * num_vectors], and the
// numbers of their dtypes.
struct StepOperands {
  ffi::RemainingArgs arguments;
  ffi::RemainingRets results;
  Integers copies;
  size_t num_vectors, num_parameters, num_moments;
  bool has_copies, has_addresses;

  size_t NumUpdated() const { return num_parameters * (1 + num_moments); }
  ffi::AnyBuffer Gradient(size_t vector) const { return *arguments.get<ffi::AnyBuffer>(1 + vector); }
  ffi::AnyBuffer Updated(size_t i) const { return *arguments.get<ffi::AnyBuffer>(1 + num_vectors + i); }
  ffi::AnyBuffer Result(size_t i) const { return **results.get<ffi::AnyBuffer>(i); }
  ffi::AnyBuffer Copy(size_t vector) const { return Result(NumUpdated() + vector); }
  Dtype CopyDtype(size_t vector) const {
    return has_addresses ? static_cast<Dtype>(copies[vector]) : *FindDtype(Copy(vector));
  }
  int64_t CopySize(size_t vector) const { return (has_addresses ? Gradient(vector) : Copy(vector)).element_count(); }
  ffi::AnyBuffer Addresses() const { return *arguments.get<ffi::AnyBuffer>(arguments.size() - 1); }
  void* CopyAt(size_t vector, int64_t offset) const {
    if (!has_addresses) return At(Copy(vector), offset);
    void* data;
    std::memcpy(&data, static_cast<const char*>(Addresses().untyped_data()) + sizeof(data) * vector, sizeof(data));
    return Skip(CopyDtype(vector), data, offset);
  }
  ffi::AnyBuffer OldCopy(size_t vector) const { return Updated(NumUpdated() + vector); }
};

// Adds the number of the parameter or vector to an error; only on errors, because it allocates.
ffi::Error Numbered(const ffi::Error& error, const char* name, size_t i) {
  if (error.success()) return error;
  return ffi::Error::InvalidArgument(error.message() + " (" + name + " " + std::to_string(i) + ")");
}

// Checks the addresses of the copies, which take the place of operands and results for them.
ffi::Error CheckAddresses(StepOperands& operands) {
  operands.num_vectors = operands.arguments.size() - operands.NumUpdated() - 2;
  const ffi::AnyBuffer addresses = operands.Addresses();
  if (addresses.element_type() != ffi::DataType::U8 || addresses.element_count() != sizeof(void*) * operands.num_vectors) {
    return Invalid(kHostStep, "without results for the copies, the last argument must be their addresses, uint8[" +
                                  std::to_string(sizeof(void*) * operands.num_vectors) + "], got " +
                                  Describe(addresses));
  }
  if (operands.copies.size() != operands.num_vectors) {
    return Invalid(kHostStep, "copies must have the dtype of each of the " + std::to_string(operands.num_vectors) +
                                  " copies, got " + std::to_string(operands.copies.size()));
  }
  for (size_t i = 0; i < operands.num_vectors; ++i) {
    if (operands.copies[i] < 0 || operands.copies[i] > static_cast<int64_t>(Dtype::kFloat16)) {
      return Invalid(kHostStep, "copies must lie in [0, 2], got " + std::to_string(operands.copies[i]));
    }
    const Dtype dtype = operands.CopyDtype(i);
    const auto address = reinterpret_cast<uintptr_t>(operands.CopyAt(i, 0));
    if (address == 0 || address % ItemSize(dtype) != 0) {
      return Invalid(kHostStep, "the address of copy " + std::to_string(i) + " must be a multiple of " +
                                    std::to_string(ItemSize(dtype)) + " other than 0, got " + std::to_string(address));
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckCounts(StepOperands& operands, Integers vectors, Integers offsets, Integers decays) {
  const size_t n = vectors.size(), num_results = operands.results.size(), num_arguments = operands.arguments.size();
  if (offsets.size() != n || decays.size() != n) {
    return Invalid(kHostStep, "vectors, offsets and decays must have one number for each parameter, got " +
                                  std::to_string(n) + ", " + std::to_string(offsets.size()) + " and " +
                                  std::to_string(decays.size()));
  }
  operands.num_parameters = n;
  const size_t num_updated = operands.NumUpdated();
  if (num_results < num_updated) {
    return Invalid(kHostStep, "there must be " + std::to_string(num_updated) + " masters and moments and the copies " +
                                  "as results, got " + std::to_string(num_results));
  }
  operands.has_addresses = num_results == num_updated && num_arguments > 1 + num_updated;
  if (operands.has_addresses) return CheckAddresses(operands);
  operands.num_vectors = num_results - num_updated;
  const size_t without_copies = 1 + operands.num_vectors + num_updated;
  operands.has_copies = num_arguments == without_copies + operands.num_vectors;
  if (!operands.has_copies && num_arguments != without_copies) {
    return Invalid(kHostStep, "there must be " + std::to_string(without_copies) + " arguments, or " +
                                  std::to_string(without_copies + operands.num_vectors) + " with the copies, got " +
                                  std::to_string(num_arguments));
  }
  return ffi::Error::Success();
}

ffi::Error CheckFactors(ffi::AnyBuffer factors) {
  if (factors.element_type() == ffi::DataType::F32 && factors.element_count() == kNumStepFactors) {
    return ffi::Error::Success();
  }
  return Invalid(kHostStep,
                 "factors must be float32[" + std::to_string(kNumStepFactors) + "], got " + Describe(factors));
}

ffi::Error CheckVector(const StepOperands& operands, size_t i) {
  Dtype dtype;
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(kHostStep, "the gradient", operands.Gradient(i), &dtype));
  if (operands.has_addresses) return ffi::Error::Success();
  JAXFERRY_RETURN_IF_ERROR(CheckFloating(kHostStep, "the copy", operands.Copy(i), &dtype));
  if (!operands.has_copies) return ffi::Error::Success();
  return CheckAliased(kHostStep, "the copy", operands.OldCopy(i), operands.Copy(i));
}

// Checks a master or moment: fp32, of the master's size, updated in place.
ffi::Error CheckUpdated(const StepOperands& operands, const char* name, size_t i, size_t place, float** data) {
  const ffi::AnyBuffer updated = operands.Updated(place), master = operands.Updated(i);
  if (updated.element_type() != ffi::DataType::F32) {
    return Invalid(kHostStep, std::string(name) + " must be float32, got " + Describe(updated));
  }
  if (updated.element_count() != master.element_count()) {
    return Invalid(kHostStep, std::string(name) + " must have the size of its master, got " + Describe(updated) +
                                  " and " + Describe(master));
  }
  *data = static_cast<float*>(updated.untyped_data());
  return CheckAliased(kHostStep, name, updated, operands.Result(place));
}

ffi::Error FindPart(const StepOperands& operands, size_t i, int64_t vector, int64_t offset, int64_t decays,
                    StepPart* part) {
  const size_t n = operands.num_parameters;
  if (vector < 0 || vector >= static_cast<int64_t>(operands.num_vectors)) {
    return Invalid(kHostStep, "vectors must lie in [0, " + std::to_string(operands.num_vectors) + "), got " +
                                  std::to_string(vector));
  }
  *part = {};
  JAXFERRY_RETURN_IF_ERROR(CheckUpdated(operands, "the master", i, i, &part->master));
  if (operands.num_moments > 0) {
    JAXFERRY_RETURN_IF_ERROR(CheckUpdated(operands, "the first moment", i, n + i, &part->first));
  }
  if (operands.num_moments > 1) {
    JAXFERRY_RETURN_IF_ERROR(CheckUpdated(operands, "the second moment", i, 2 * n + i, &part->second));
  }
  JAXFERRY_RETURN_IF_ERROR(CheckFlag(kHostStep, "decays", decays, &part->decays));
  const ffi::AnyBuffer gradient = operands.Gradient(vector);
  part->size = operands.Updated(i).element_count();
  JAXFERRY_RETURN_IF_ERROR(CheckInside(kHostStep, "the gradient", gradient, offset, part->size, 1));
  if (!operands.has_addresses) {
    JAXFERRY_RETURN_IF_ERROR(CheckInside(kHostStep, "the copy", operands.Copy(vector), offset, part->size, 1));
  }
  part->gradient_dtype = *FindDtype(gradient);
  part->copy_dtype = operands.CopyDtype(vector);
  part->gradient = At(gradient, offset);
  part->copy = operands.CopyAt(vector, offset);
  return ffi::Error::Success();
}

ffi::Error FindParts(const StepOperands& operands, Integers vectors, Integers offsets, Integers decays,
                     std::vector<StepPart>* parts) {
  for (size_t i = 0; i < operands.num_vectors; ++i) {
    JAXFERRY_RETURN_IF_ERROR(Numbered(CheckVector(operands, i), "vector", i));
  }
  parts->resize(vectors.size());
  for (size_t i = 0; i < parts->size(); ++i) {
    const ffi::Error error = FindPart(operands, i, vectors[i], offsets[i], decays[i], &(*parts)[i]);
    JAXFERRY_RETURN_IF_ERROR(Numbered(error, "parameter", i));
  }
  return ffi::Error::Success();
}

// The bytes that a step reads and writes: gradients once, masters and moments twice, copies once.
int64_t MovedBytes(const StepOperands& operands) {
  int64_t bytes = 0;
  for (size_t i = 0; i < operands.num_vectors; ++i) {
    bytes += NumBytes(operands.Gradient(i)) + operands.CopySize(i) * ItemSize(operands.CopyDtype(i));
  }
  for (size_t i = 0; i < operands.NumUpdated(); ++i) bytes += 2 * NumBytes(operands.Updated(i));
  return bytes;
}

StepFactors FactorsFrom(ffi::AnyBuffer buffer) {
  const float* f = static_cast<const float*>(buffer.untyped_data());
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6]};
}

StepConstants ConstantsFrom(double b1, double b2, double eps, double eps_root) {
  return {static_cast<float>(b1),     static_cast<float>(1 - b1), static_cast<float>(b2),
          static_cast<float>(1 - b2), static_cast<float>(eps),    static_cast<float>(eps_root)};
}

ffi::Error HostStepHandler(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t rule, Integers vectors,
                           Integers offsets, Integers decays, Integers copies, double b1, double b2, double eps,
                           double eps_root) {
  return Guarded(kHostStep, [&] {
    if (rule < 0 || rule >= kNumStepRules) {
      return Invalid(kHostStep, "rule must lie in [0, " + std::to_string(kNumStepRules) + "), got " +
                                    std::to_string(rule));
    }
    if (arguments.size() == 0) return Invalid(kHostStep, "there must be factors as the first argument, got none");
    StepOperands operands{arguments, results, copies, 0, 0, 0, false, false};
    operands.num_moments = NumMoments(static_cast<StepRule>(rule));
    const ffi::AnyBuffer factors = *arguments.get<ffi::AnyBuffer>(0);
    JAXFERRY_RETURN_IF_ERROR(CheckFactors(factors));
    JAXFERRY_RETURN_IF_ERROR(CheckCounts(operands, vectors, offsets, decays));
    // Kept per thread, so that calls stop allocating once it fits the largest layer.
    thread_local std::vector<StepPart> parts;
    JAXFERRY_RETURN_IF_ERROR(FindParts(operands, vectors, offsets, decays, &parts));
    const int64_t num_bytes = MovedBytes(operands);
    moved_bytes += num_bytes;
    const EmulatedTime updating(kHost, num_bytes);
    RunHostStep({static_cast<StepRule>(rule), FactorsFrom(factors), ConstantsFrom(b1, b2, eps, eps_root), parts.data(),
                 static_cast<int64_t>(parts.size())});
    return ffi::Error::Success();
  });
}

}  // namespace

static int64_t AllMovedBytes() { return moved_bytes; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_host_step, HostStepHandler,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()  // factors, gradients, masters, moments, copies or addresses
                                  .RemainingRets()  // masters, moments, copies
                                  .Attr<int64_t>("rule")
                                  .Attr<Integers>("vectors")
                                  .Attr<Integers>("offsets")
                                  .Attr<Integers>("decays")
                                  .Attr<Integers>("copies")
                                  .Attr<double>("b1")
                                  .Attr<double>("b2")
                                  .Attr<double>("eps")
                                  .Attr<double>("eps_root"));

}  // namespace jaxferry

int64_t jaxferry_host_step_bytes() { return jaxferry::AllMovedBytes(); }
