// The checks of the operations by themselves, on made-up buffers, for tools/sanitize: what they let pass lies within its
// buffers, whatever the dtype; what they refuse, they name.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/checks.h"

using namespace jaxferry;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

namespace {

struct Sized {
  XLA_FFI_DataType dtype;
  int64_t bits;
  const char* name;
};

// By the definition of each dtype, not by the table of the library.
const Sized kDtypes[] = {
    {XLA_FFI_DataType_PRED, 8, "bool"},
    {XLA_FFI_DataType_S1, 1, "int1"},
    {XLA_FFI_DataType_U1, 1, "uint1"},
    {XLA_FFI_DataType_S2, 2, "int2"},
    {XLA_FFI_DataType_U2, 2, "uint2"},
    {XLA_FFI_DataType_S4, 4, "int4"},
    {XLA_FFI_DataType_U4, 4, "uint4"},
    {XLA_FFI_DataType_F4E2M1FN, 4, "float4_e2m1fn"},
    {XLA_FFI_DataType_S8, 8, "int8"},
    {XLA_FFI_DataType_U8, 8, "uint8"},
    {XLA_FFI_DataType_F8E3M4, 8, "float8_e3m4"},
    {XLA_FFI_DataType_F8E4M3, 8, "float8_e4m3"},
    {XLA_FFI_DataType_F8E4M3FN, 8, "float8_e4m3fn"},
    {XLA_FFI_DataType_F8E4M3FNUZ, 8, "float8_e4m3fnuz"},
    {XLA_FFI_DataType_F8E4M3B11FNUZ, 8, "float8_e4m3b11fnuz"},
    {XLA_FFI_DataType_F8E5M2, 8, "float8_e5m2"},
    {XLA_FFI_DataType_F8E5M2FNUZ, 8, "float8_e5m2fnuz"},
    {XLA_FFI_DataType_F8E8M0FNU, 8, "float8_e8m0fnu"},
    {XLA_FFI_DataType_S16, 16, "int16"},
    {XLA_FFI_DataType_U16, 16, "uint16"},
    {XLA_FFI_DataType_F16, 16, "float16"},
    {XLA_FFI_DataType_BF16, 16, "bfloat16"},
    {XLA_FFI_DataType_S32, 32, "int32"},
    {XLA_FFI_DataType_U32, 32, "uint32"},
    {XLA_FFI_DataType_F32, 32, "float32"},
    {XLA_FFI_DataType_S64, 64, "int64"},
    {XLA_FFI_DataType_U64, 64, "uint64"},
    {XLA_FFI_DataType_F64, 64, "float64"},
    {XLA_FFI_DataType_C64, 64, "complex64"},
    {XLA_FFI_DataType_C128, 128, "complex128"},
};
const XLA_FFI_DataType kUnknown = static_cast<XLA_FFI_DataType>(63);

// Memory of exactly the bytes that XLA gives to so many elements; the address sanitizer watches its ends.
struct Memory {
  Memory(int64_t elements, int64_t bits) : data((elements * bits + 7) / 8) {}
  std::vector<unsigned char> data;
};

// Buffers of one call, as arguments and results.
class Call {
 public:
  // Another buffer of the same memory if `alias` names an earlier one.
  size_t Add(const Sized& dtype, int64_t elements, bool is_result = false, int alias = -1) {
    if (alias < 0) memories_.emplace_back(elements, dtype.bits == 0 ? 8 : dtype.bits);
    dims_.push_back(elements);
    void* data = alias < 0 ? memories_.back().data.data() : buffers_[alias].data;
    buffers_.push_back({sizeof(XLA_FFI_Buffer), nullptr, dtype.dtype, data, 1, &dims_.back()});
    (is_result ? results_ : arguments_).push_back(&buffers_.back());
    return buffers_.size() - 1;
  }

  ffi::AnyBuffer Buffer(size_t i) const { return ffi::AnyBuffer(&buffers_[i]); }

  ffi::RemainingArgs Arguments() {
    argument_types_.assign(arguments_.size(), XLA_FFI_ArgType_BUFFER);
    args_ = {sizeof(XLA_FFI_Args), nullptr, static_cast<int64_t>(arguments_.size()), argument_types_.data(),
             arguments_.data()};
    return ffi::RemainingArgs(&args_, 0);
  }

  ffi::RemainingRets Results() {
    result_types_.assign(results_.size(), XLA_FFI_RetType_BUFFER);
    rets_ = {sizeof(XLA_FFI_Rets), nullptr, static_cast<int64_t>(results_.size()), result_types_.data(),
             results_.data()};
    return ffi::RemainingRets(&rets_, 0);
  }

 private:
  std::deque<Memory> memories_;
  std::deque<int64_t> dims_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> arguments_, results_;
  std::vector<XLA_FFI_ArgType> argument_types_;
  std::vector<XLA_FFI_RetType> result_types_;
  XLA_FFI_Args args_;
  XLA_FFI_Rets rets_;
};

bool Names(const ffi::Error& error, const std::string& text) {
  return error.failure() && error.message().find(text) != std::string::npos &&
         error.message().find('\n') == std::string::npos;
}

// A load of `elements` from an offset of a vector; the checks' answer, and the copies that they let pass.
ffi::Error Load(const Sized& dtype, int64_t vector, int64_t offset, int64_t elements, Copies* copies) {
  Call call;
  call.Add(dtype, vector);
  const size_t array = call.Add(dtype, elements);
  call.Add(dtype, elements, /*is_result=*/true, static_cast<int>(array));
  const int64_t vectors[] = {0}, offsets[] = {offset};
  Vacancy vacancy;
  const ffi::Error error = CheckFerryLoad(call.Arguments(), call.Results(), Integers(vectors, 1), Integers(offsets, 1),
                                          0, copies, &vacancy);
  if (error.success()) {
    const Copy& copy = (*copies)[0];
    // Ends the process under the address sanitizer if either end lies outside.
    std::vector<unsigned char> read(static_cast<const unsigned char*>(copy.source),
                                    static_cast<const unsigned char*>(copy.source) + copy.bytes);
    std::copy(read.begin(), read.end(), static_cast<unsigned char*>(copy.destination));
  }
  return error;
}

void TestCopiesHaveTheBytesOfTheirDtype() {
  for (const Sized& dtype : kDtypes) {
    for (int64_t elements : {0, 1, 2, 3, 7, 8, 9, 64, 65}) {
      Call call;
      call.Add(dtype, elements);
      EXPECT(NumBytes(call.Buffer(0)) == (elements * dtype.bits + 7) / 8);
      EXPECT(Describe(call.Buffer(0)) == std::string(dtype.name) + "[" + std::to_string(elements) + "]");
      Copies copies;
      EXPECT(Load(dtype, elements + 24, 8, elements, &copies).success());
      EXPECT(copies[0].bytes == (elements * dtype.bits + 7) / 8);
    }
  }
}

void TestWhatPassesLiesWithinItsBuffers() {
  std::mt19937 random(1);
  int passed = 0;
  for (int i = 0; i < 20000; ++i) {
    const Sized& dtype = kDtypes[random() % std::size(kDtypes)];
    const int64_t vector = random() % 40, elements = random() % 24, offset = static_cast<int64_t>(random() % 44) - 2;
    Copies copies;
    const bool fits = offset >= 0 && offset + elements <= vector && offset * dtype.bits % 8 == 0;
    EXPECT(Load(dtype, vector, offset, elements, &copies).success() == fits);
    passed += fits;
  }
  EXPECT(passed > 2000);
}

void TestAnElementWithinAByteIsRefused() {
  Copies copies;
  EXPECT(Names(Load({XLA_FFI_DataType_S4, 4, "int4"}, 16, 3, 4, &copies),
               "element 3 of the host vector of array 0, int4[16], must be the first one of a byte"));
  EXPECT(Names(Load({XLA_FFI_DataType_S2, 2, "int2"}, 16, 2, 4, &copies), "must be the first one of a byte"));
  EXPECT(copies.empty());
}

void TestADtypeOfUnknownSizeIsRefused() {
  Copies copies;
  EXPECT(Names(Load({kUnknown, 0, ""}, 8, 0, 8, &copies),
               "must have a dtype whose size is known, got dtype 63[8]"));
  EXPECT(copies.empty());
}

void TestAResultOfOtherMemoryIsRefused() {
  const Sized f32 = {XLA_FFI_DataType_F32, 32, "float32"};
  for (const Sized& dtype : kDtypes) {
    Call load;
    load.Add(dtype, 8);
    load.Add(dtype, 8);
    load.Add(dtype, 8, /*is_result=*/true);
    const int64_t zero[] = {0};
    Copies copies;
    const Integers zeros(zero, 1);
    Vacancy vacancy;
    EXPECT(
        Names(CheckFerryLoad(load.Arguments(), load.Results(), zeros, zeros, 0, &copies, &vacancy), "must alias it"));
    EXPECT(Names(CheckFerryLoad(load.Arguments(), load.Results(), zeros, zeros, 3, &copies, &vacancy),
                 "ferry_load: vacant must be 0, 1 or 2, got 3"));
    EXPECT(copies.empty());
    Call wait;
    wait.Add(dtype, 8);
    wait.Add(dtype, 8, /*is_result=*/true);
    Ranges ranges;
    EXPECT(Names(CheckInPlace("ferry_wait", wait.Arguments(), wait.Results(), &ranges), "must alias it"));
    EXPECT(ranges.empty());
  }
  Call store;
  store.Add(f32, 4);
  store.Add(f32, 8);
  store.Add(f32, 8, /*is_result=*/true);
  const int64_t zero[] = {0};
  Copies copies;
  EXPECT(Names(CheckFerryStore(store.Arguments(), store.Buffer(2), Integers(zero, 1), 0, &copies), "must alias it"));
  EXPECT(copies.empty());
  Store stored;
  EXPECT(Names(CheckStore(store.Buffer(1), store.Buffer(0), store.Buffer(2), 0, 0, &stored), "must alias it"));
  EXPECT(CheckStore(store.Buffer(1), store.Buffer(0), store.Buffer(1), 4, 0, &stored).success());
  EXPECT(Names(CheckStore(store.Buffer(1), store.Buffer(0), store.Buffer(1), 5, 0, &stored), "do not lie inside"));
}

void TestWaitsCoverTheBytesOfTheirDtype() {
  for (const Sized& dtype : kDtypes) {
    Call call;
    const size_t array = call.Add(dtype, 21);
    call.Add(dtype, 21, /*is_result=*/true, static_cast<int>(array));
    Ranges ranges;
    EXPECT(CheckInPlace("ferry_wait", call.Arguments(), call.Results(), &ranges).success());
    EXPECT(ranges[0].bytes == (21 * dtype.bits + 7) / 8);
  }
}

}  // namespace

int main() {
  TestCopiesHaveTheBytesOfTheirDtype();
  TestWhatPassesLiesWithinItsBuffers();
  TestAnElementWithinAByteIsRefused();
  TestADtypeOfUnknownSizeIsRefused();
  TestAResultOfOtherMemoryIsRefused();
  TestWaitsCoverTheBytesOfTheirDtype();
  return 0;
}
