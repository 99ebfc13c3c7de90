// Rounding to bf16, and how much room sums and their flags need.
#include <cmath>
#include <limits>

#include "core/transfer/gradients.hpp"
#include "support/check.hpp"

namespace {

float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The bf16 whose value is nearest, the even one of two; beyond the largest, as if there were one
// more. Found by comparing distances, which are exact in double precision.
uint16_t nearest(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const auto below = static_cast<uint16_t>(bits >> 16);  // nearer to zero
  const uint16_t above = static_cast<uint16_t>(below + 1);
  const auto magnitude = [](uint16_t candidate) {
    const uint16_t size = candidate & 0x7FFF;
    if (size == 0x7F80) return std::ldexp(1.0, 128);
    return static_cast<double>(as_float(static_cast<uint32_t>(size) << 16));
  };
  const double exact = std::fabs(static_cast<double>(value));
  if (std::isinf(value)) return below;
  const double down = exact - magnitude(below), up = magnitude(above) - exact;
  if (down != up) return down < up ? below : above;
  return below % 2 == 0 ? below : above;
}

void check_rounding() {
  const uint32_t tails[] = {0,      1,      2,      0x7FFE, 0x7FFF, 0x8000,
                            0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234};
  for (uint32_t head = 0; head < 1 << 16; ++head)
    for (const uint32_t tail : tails) {
      const float value = as_float(head << 16 | tail);
      const uint16_t rounded = uec::to_bfloat16(value);
      if (std::isnan(value))
        CHECK_EQ(rounded, 0x7FC0);
      else
        CHECK_EQ(rounded, nearest(value));
    }
}

// Every bf16 is a float, and survives the round trip, except that all NaNs become one.
void check_round_trip() {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float value = uec::from_bfloat16(static_cast<uint16_t>(bits));
    CHECK_EQ(__builtin_bit_cast(uint32_t, value), bits << 16);
    CHECK_EQ(uec::to_bfloat16(value), std::isnan(value) ? 0x7FC0 : bits);
  }
}

void check_room() {
  constexpr int64_t kTile = 32 << 10;
  CHECK_EQ(uec::max_grad_groups(0, kTile), 0);
  CHECK_EQ(uec::max_grad_groups(10, kTile), 10);
  CHECK_EQ(uec::max_grad_groups(10, 4 << 10), 2);
  CHECK_EQ(uec::sums_bytes(0, kTile), 0);
  CHECK_EQ(uec::sums_bytes(1, kTile), 2 * kTile);
  CHECK_EQ(uec::sums_bytes(8, kTile), 4 * 2 * kTile);
  CHECK_EQ(uec::sums_bytes(9, kTile), 5 * 2 * kTile);
  CHECK_EQ(uec::sums_bytes(2, kTile), 2 * kTile);
  CHECK_EQ(uec::sums_bytes(3, 64 << 10), 2 * 2 * (64 << 10));
}

}  // namespace

int main() {
  check_rounding();
  check_round_trip();
  check_room();
}
