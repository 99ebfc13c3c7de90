// Adding up on the CPU: the bits of one element after the other, at any address, for any number of
// sources, and where the sum takes the place of one of them.
#include <cstring>
#include <vector>

#include "host/adder.hpp"
#include "support/check.hpp"
#include "support/numbers.hpp"
#include "support/plans.hpp"

namespace {

using uec::GradType;

uint32_t draw_bits(Random& random) {  // of any number that is none of not-a-number
  for (;;) {
    const auto bits = static_cast<uint32_t>(random());
    if ((bits & 0x7F800000) < 0x7D000000) return bits;
  }
}

struct Sources {
  // Sources lie at any address, except the one that takes the sum.
  Sources(int32_t n, int64_t elements, GradType of_type, Random& random, int32_t aligned = -1)
      : type(of_type) {
    for (int32_t s = 0; s < n; ++s) {
      const auto any = static_cast<int32_t>(draw(random, 0, 1) * draw(random, 0, 5));
      skew.push_back(s == aligned ? any / 4 * 4 : any);
      bytes.emplace_back(elements * 4 + 8);
      for (int64_t i = 0; i < elements; ++i) {
        const uint32_t bits = draw_bits(random);
        const auto half = static_cast<uint16_t>(bits >> 16);
        if (type == GradType::kFloat32)
          std::memcpy(at(s) + 4 * i, &bits, 4);
        else
          std::memcpy(at(s) + 2 * i, &half, 2);
      }
    }
  }
  uint8_t* at(int32_t s) { return bytes[s].data() + skew[s]; }
  float sum(int64_t i) {
    float value = number_at(at(0), i, type);
    for (size_t s = 1; s < bytes.size(); ++s)
      value += number_at(at(static_cast<int32_t>(s)), i, type);
    return value;
  }

  GradType type;
  std::vector<int32_t> skew;
  std::vector<std::vector<uint8_t>> bytes;
};

void check(int32_t n, int64_t elements, GradType type, Random& random) {
  const auto own = static_cast<int32_t>(draw(random, 0, n - 1));
  Sources sources(n, elements, type, random, own);
  std::vector<uint8_t> right(elements * 4), to(elements * 4 + 12, 0xEE);
  for (int64_t i = 0; i < elements; ++i) {
    const float sum = sources.sum(i);
    std::memcpy(right.data() + 4 * i, &sum, 4);
  }
  const auto source = [&](int32_t s) -> const uint8_t* { return sources.at(s); };
  uec::host::HostAdder adder;
  adder.sum(to.data() + 4, n, source, elements, type);
  CHECK(std::memcmp(to.data() + 4, right.data(), right.size()) == 0);
  for (const size_t outside : {size_t{0}, size_t{3}, right.size() + 4, right.size() + 11})
    CHECK_EQ(to[outside], 0xEE);

  for (const GradType main_type : {GradType::kFloat32, GradType::kBFloat16}) {
    Sources main(1, elements, main_type, random);
    std::vector<uint8_t> added(elements * bytes_of(main_type));
    for (int64_t i = 0; i < elements; ++i) {
      const float value = number_at(main.at(0), i, main_type) + sources.sum(i);
      put_number(added.data(), i, main_type, value);
    }
    adder.add(main.at(0), main_type, n, source, elements, type);
    CHECK(std::memcmp(main.at(0), added.data(), added.size()) == 0);
  }

  if (type == GradType::kFloat32) {  // in place of any source
    adder.sum(sources.at(own), n, source, elements, type);
    CHECK(std::memcmp(sources.at(own), right.data(), right.size()) == 0);
  }
}

void check_zero(Random& random) {
  uec::host::HostAdder adder;
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int64_t before = draw(random, 0, 70), bytes = draw(random, 0, 5000);
    std::vector<uint8_t> memory(before + bytes + 70, 0xEE);
    adder.zero(memory.data() + before, bytes);
    adder.try_delivered(adder.ticket(), [](uec::Delivered) {});
    for (size_t i = 0; i < memory.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      CHECK_EQ(memory[i], at >= before && at < before + bytes ? 0 : 0xEE);
    }
  }
}

}  // namespace

int main() {
  Random random(41);
  for (const GradType type : {GradType::kFloat32, GradType::kBFloat16})
    for (int32_t n = 1; n <= 20; n += kSanitized ? 4 : 1)  // beyond what one pass takes
      for (const int64_t elements : {1, 7, 64, 1003, 2048, 4100}) check(n, elements, type, random);
  check_zero(random);
}
