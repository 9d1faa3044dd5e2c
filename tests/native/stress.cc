// Runs the CPU's kernels and queues without XLA, for tools/sanitize: compares with plain loops, and ends with the first
// difference. Thread and address sanitizers watch.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/blas.h"
#include "cpu/callbacks.h"
#include "cpu/convert.h"
#include "cpu/dha_gather.h"
#include "cpu/dha_matmul.h"
#include "cpu/ferry.h"
#include "cpu/ferry_queue.h"
#include "stress_host_step.h"

using namespace jaxferry;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

namespace {

// The value of a half, by its definition.
double ValueOfFloat16(uint16_t half) {
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  const int exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

void TestEveryHalfIsItsValue() {
  std::vector<uint16_t> halves(65536), back(65536);
  std::vector<float> numbers(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  ToFloat32(Dtype::kFloat16, halves.data(), numbers.data(), 65536);
  FromFloat32(Dtype::kFloat16, numbers.data(), back.data(), 65536);
  for (size_t i = 0; i < halves.size(); ++i) {
    const double value = ValueOfFloat16(halves[i]);
    if (std::isnan(value)) {
      EXPECT(std::isnan(numbers[i]) && std::isnan(ValueOfFloat16(back[i])));
    } else {
      EXPECT(numbers[i] == value && std::signbit(numbers[i]) == std::signbit(value) && back[i] == halves[i]);
    }
  }
}

// Rounded to nearest, ties to even: no neighbour is nearer, and none as near is even where this one is odd.
void ExpectNearest(float number, uint16_t rounded, const std::function<double(uint16_t)>& value_of) {
  const double distance = std::fabs(value_of(rounded) - number);
  for (const int step : {-1, 1}) {
    const uint16_t neighbour = static_cast<uint16_t>(rounded + step);
    if ((neighbour & 0x8000) != (rounded & 0x8000) || !std::isfinite(value_of(neighbour))) continue;
    const double other = std::fabs(value_of(neighbour) - number);
    EXPECT(distance < other || (distance == other && rounded % 2 == 0));
  }
}

double ValueOfBfloat16(uint16_t number) {
  float value;
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void TestRoundsToNearestEven() {
  std::mt19937 random(1);
  std::vector<float> numbers;
  for (int i = 0; i < 20000; ++i) {
    const double exponent = std::uniform_real_distribution<double>(-26, 15.9)(random);
    numbers.push_back(static_cast<float>((i % 2 == 0 ? 1 : -1) * std::exp2(exponent)));
  }
  for (int half = 0; half < 0x7bff; half += 7) {  // halfway between two halves
    numbers.push_back(static_cast<float>((ValueOfFloat16(half) + ValueOfFloat16(half + 1)) / 2));
  }
  const int64_t size = static_cast<int64_t>(numbers.size());
  std::vector<uint16_t> rounded(size);
  FromFloat32(Dtype::kFloat16, numbers.data(), rounded.data(), size);
  for (int64_t i = 0; i < size; ++i) ExpectNearest(numbers[i], rounded[i], ValueOfFloat16);
  FromFloat32(Dtype::kBfloat16, numbers.data(), rounded.data(), size);
  for (int64_t i = 0; i < size; ++i) ExpectNearest(numbers[i], rounded[i], ValueOfBfloat16);
}

void TestSpecialNumbersStayThemselves() {
  float nan_with_low_bits;
  const uint32_t bits = 0x7f800001;
  std::memcpy(&nan_with_low_bits, &bits, sizeof(bits));
  const std::vector<float> numbers = {INFINITY, -INFINITY, nan_with_low_bits, NAN, 65519.0f, 65520.0f, -0.0f, 3.4e38f};
  uint16_t rounded[8];
  FromFloat32(Dtype::kFloat16, numbers.data(), rounded, 8);
  EXPECT(rounded[0] == 0x7c00 && rounded[1] == 0xfc00 && (rounded[2] & 0x3ff) != 0 && (rounded[3] & 0x3ff) != 0);
  EXPECT(rounded[4] == 0x7bff && rounded[5] == 0x7c00 && rounded[6] == 0x8000 && rounded[7] == 0x7c00);
  FromFloat32(Dtype::kBfloat16, numbers.data(), rounded, 8);
  EXPECT(rounded[0] == 0x7f80 && rounded[1] == 0xff80 && (rounded[2] & 0x7f) != 0 && (rounded[3] & 0x7f) != 0);
  EXPECT(rounded[6] == 0x8000 && rounded[7] == 0x7f80);
}

// The Fortran sgemm by its definition, on column-major matrices.
void PlainSgemm(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k, const float* alpha,
                const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
                const int* ldc) {
  for (int column = 0; column < *n; ++column) {
    for (int row = 0; row < *m; ++row) {
      float sum = 0;
      for (int i = 0; i < *k; ++i) {
        sum += a[*trans_a == 'T' ? row * *lda + i : i * *lda + row] *
               b[*trans_b == 'T' ? i * *ldb + column : column * *ldb + i];
      }
      float& place = c[column * *ldc + row];
      place = *alpha * sum + (*beta == 0 ? 0 : *beta * place);
    }
  }
}

std::vector<float> SmallIntegers(int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(size);
  for (float& number : numbers) number = static_cast<float>(static_cast<int>(random() % 9) - 4);
  return numbers;
}

// Numbers in another dtype; as floats for the sake of alignment.
std::vector<float> In(Dtype dtype, const std::vector<float>& numbers) {
  std::vector<float> storage(numbers.size());
  FromFloat32(dtype, numbers.data(), storage.data(), static_cast<int64_t>(numbers.size()));
  return storage;
}

// Small integers: every dtype holds them and their sums exactly, so equal means equal.
void TestProducts(int64_t m, int64_t k, int64_t n, bool transpose, Dtype dtype, int64_t scratch_bytes) {
  const std::vector<float> x = SmallIntegers(m * k, 1), w = SmallIntegers(k * n, 2), dy = SmallIntegers(m * n, 3);
  const std::vector<float> given_x = In(dtype, x), given_w = In(dtype, w), given_dy = In(dtype, dy);
  std::vector<float> scratch(scratch_bytes / 4), y(m * n, NAN), gradient(k * n, 1.0f);
  RunMatmul({dtype, dtype, Dtype::kFloat32, given_x.data(), given_w.data(), y.data(), scratch.data(), scratch_bytes, m,
             k, n, k, n, transpose});
  RunMatmulGradient({dtype, Dtype::kFloat32, given_x.data(), given_dy.data(), gradient.data(), scratch.data(),
                     scratch_bytes, m, k, n, k, n, transpose, true, std::nullopt});
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t row = 0; row < m; ++row) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += x[row * k + i] * w[transpose ? column * k + i : i * n + column];
      EXPECT(y[row * n + column] == sum);
    }
    for (int64_t i = 0; i < k; ++i) {
      float sum = 1.0f;
      for (int64_t row = 0; row < m; ++row) sum += x[row * k + i] * dy[row * n + column];
      EXPECT(gradient[transpose ? column * k + i : i * n + column] == sum);
    }
  }
}

void TestEveryProduct() {
  SetBlas(reinterpret_cast<void*>(PlainSgemm));
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const bool transpose : {false, true}) {
      for (const int64_t scratch_bytes : {0, 64, 1000, 1 << 16}) {
        TestProducts(3, 5, 7, transpose, dtype, scratch_bytes);
        TestProducts(1, 9, 130, transpose, dtype, scratch_bytes);
        TestProducts(0, 5, 7, transpose, dtype, scratch_bytes);
        TestProducts(4, 0, 7, transpose, dtype, scratch_bytes);
        TestProducts(4, 5, 0, transpose, dtype, scratch_bytes);
      }
    }
  }
}

void TestGather() {
  const std::vector<float> table = {0, 1, 2, 3, 4, 5};
  const std::vector<int32_t> indices = {2, -1, 0, 3, 2};
  std::vector<float> rows(10);
  RunGather({Dtype::kFloat32, table.data(), indices.data(), rows.data(), nullptr, 5, 3, 2});
  EXPECT(rows[0] == 4 && rows[1] == 5 && rows[4] == 0 && rows[5] == 1 && rows[8] == 4 && rows[9] == 5);
  EXPECT(std::isnan(rows[2]) && std::isnan(rows[3]) && std::isnan(rows[6]) && std::isnan(rows[7]));
}

// Waits for ranges as the handler does.
void Wait(Ferry& ferry, const Ranges& ranges) {
  auto done = std::make_shared<std::promise<void>>();
  ferry.CallWhenDone(ranges, [done] { done->set_value(); });
  done->get_future().wait();
}

// Loads, changes, stores and adds vectors of its own, as one layer's steps do.
void RunLayer(Ferry& ferry, unsigned seed, int num_steps) {
  std::mt19937 random(seed);
  const int64_t size = 1000 + random() % 40000;
  std::vector<float> host(size), device(size), gradients(size, 0.0f);
  const int64_t bytes = size * static_cast<int64_t>(sizeof(float));
  for (int step = 0; step < num_steps; ++step) {
    for (int64_t i = 0; i < size; ++i) host[i] = static_cast<float>((i * 7 + step) % 251);
    const int64_t half = bytes / 8 * 4;
    ferry.queue(kLoad).Push({{host.data(), device.data(), half, std::nullopt},
                             {reinterpret_cast<char*>(host.data()) + half,
                              reinterpret_cast<char*>(device.data()) + half, bytes - half, std::nullopt}});
    Wait(ferry, {{device.data(), bytes}});
    EXPECT(device == host);
    ferry.queue(kStore).Push({{device.data(), gradients.data(), bytes, std::nullopt}});
    ferry.queue(kStore).Push({{device.data(), gradients.data(), bytes, Dtype::kFloat32}});
    if (random() % 2 == 0) {
      Wait(ferry, {{gradients.data(), bytes}, {device.data(), bytes}});
    } else {
      ferry.Synchronize();
    }
    for (int64_t i = 0; i < size; ++i) EXPECT(gradients[i] == 2 * host[i]);
  }
}

void TestManyLayersAtOnce() {
  Ferry& ferry = Ferry::Get();
  for (const Direction direction : {kLoad, kStore}) {
    LinkSettings& settings = Ferry::Settings(direction);
    settings.delay_s = 5e-4;
    settings.seed = direction;
    ++settings.num_seeds;
  }
  std::atomic<bool> is_over{false};
  std::thread changes_speed([&] {
    for (int i = 0; !is_over; ++i) {
      Ferry::Settings(i % 2 == 0 ? kLoad : kStore).bytes_per_s = i % 3 == 0 ? 0.0 : 5e8;
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  });
  std::vector<std::thread> layers;
  for (unsigned seed = 0; seed < 6; ++seed) layers.emplace_back([&, seed] { RunLayer(ferry, seed, 25); });
  for (std::thread& layer : layers) layer.join();
  is_over = true;
  changes_speed.join();
}

// Its threads may outlive every function.
Callbacks& NewCallbacks() {
  static std::deque<Callbacks>& all = *new std::deque<Callbacks>;
  return all.emplace_back();
}

void TestCopiesRunInTheOrderTheyWerePushed() {
  LinkSettings settings;
  settings.delay_s = 2e-4;
  FerryQueue queue(settings, NewCallbacks());
  std::vector<int32_t> numbers(200), place(1, -1), seen(200, -1);
  for (int32_t i = 0; i < 200; ++i) numbers[i] = i;
  for (int32_t i = 0; i < 200; ++i) {
    queue.Push({{&numbers[i], place.data(), 4, std::nullopt}});
    queue.Push({{place.data(), &seen[i], 4, std::nullopt}});
  }
  queue.Synchronize();
  EXPECT(seen == numbers);
}

void TestMarksTellWhenCopiesRan() {
  LinkSettings settings;
  settings.bytes_per_s = 1e7;
  FerryQueue queue(settings, NewCallbacks());
  std::vector<char> source(1 << 14), destination(1 << 14);
  std::vector<std::shared_ptr<Times>> marks;
  const double begin_s = Seconds(Clock::now());
  for (int i = 0; i < 20; ++i) {
    for (int copies = 0; copies < 2; ++copies) {
      queue.Push({{source.data(), destination.data(), static_cast<int64_t>(source.size()), std::nullopt}});
    }
    marks.push_back(std::make_shared<Times>());
    queue.Mark(marks.back());
  }
  EXPECT(std::isnan(marks.back()->end_s.load()));
  queue.Synchronize();
  double last_s = begin_s;
  for (const auto& mark : marks) {
    EXPECT(mark->start_s >= last_s);
    EXPECT(mark->end_s - mark->start_s > 2 * 1.6384e-3 - 1e-6);
    last_s = mark->end_s;
  }
  EXPECT(last_s <= Seconds(Clock::now()));
}

// It would sleep for hours. At any moment, so also between the copy of a piece and the sleep until a slow link carried it.
void TestALinkThatIsOpenedSleepsNoLonger() {
  LinkSettings settings;
  FerryQueue queue(settings, NewCallbacks());
  std::vector<char> source(1 << 15), destination(1 << 15);
  for (int i = 0; i < 20000; ++i) {
    settings.bytes_per_s = 1.0;
    queue.Push({{source.data(), destination.data(), static_cast<int64_t>(source.size()), std::nullopt}});
    const auto opened = Clock::now() + std::chrono::nanoseconds(i * 5);
    while (Clock::now() < opened) {
    }
    settings.bytes_per_s = 0.0;
    queue.NoteSettings();
    queue.Synchronize();
  }
}

void TestStoppingDropsWhatIsQueuedAtOnce() {
  LinkSettings settings;
  settings.bytes_per_s = 1e6;
  Callbacks& callbacks = NewCallbacks();
  std::vector<char> source(4 << 20), destination(4 << 20);
  std::atomic<int> num_calls{0};
  const auto start = std::chrono::steady_clock::now();
  {
    FerryQueue queue(settings, callbacks);
    for (int i = 0; i < 3; ++i) {
      queue.Push({{source.data(), destination.data(), static_cast<int64_t>(source.size()), std::nullopt}});
    }
    EXPECT(queue.CallWhenDone({{destination.data(), 1}}, [&] { ++num_calls; }));
    EXPECT(!queue.CallWhenDone({{&settings, 1}}, [&] { ++num_calls; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    queue.Stop();
    EXPECT(!queue.Push({{source.data(), destination.data(), 1, std::nullopt}}));
  }
  EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
  callbacks.Stop(std::chrono::seconds(2));
  EXPECT(num_calls == 0);
}

void TestACallbackThatTakesItsTimeHoldsUpNoOther() {
  Callbacks& callbacks = NewCallbacks();
  std::promise<void> release, second;
  std::shared_future<void> released = release.get_future().share();
  callbacks.Post([released] { released.wait(); });
  callbacks.Post([&] { second.set_value(); });
  second.get_future().wait();
  release.set_value();
  callbacks.Stop(std::chrono::seconds(2));
}

}  // namespace

int main() {
  TestEveryHalfIsItsValue();
  TestRoundsToNearestEven();
  TestSpecialNumbersStayThemselves();
  TestEveryProduct();
  TestGather();
  TestCopiesRunInTheOrderTheyWerePushed();
  TestMarksTellWhenCopiesRan();
  TestManyLayersAtOnce();
  TestALinkThatIsOpenedSleepsNoLonger();
  TestStoppingDropsWhatIsQueuedAtOnce();
  TestACallbackThatTakesItsTimeHoldsUpNoOther();
  TestHostStep();
  std::puts("all hold");
  return 0;  // the process's own queues end as they do at exit
}
