// Gradient values at any address, aligned or not.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/transfer/gradients.hpp"

inline float number_at(const uint8_t* from, int64_t i, uec::GradType type) {
  if (type == uec::GradType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + 2 * i, 2);
  return uec::from_bfloat16(bits);
}

inline void put_number(uint8_t* to, int64_t i, uec::GradType type, float value) {
  const uint16_t bits = uec::to_bfloat16(value);
  if (type == uec::GradType::kFloat32)
    std::memcpy(to + 4 * i, &value, 4);
  else
    std::memcpy(to + 2 * i, &bits, 2);
}
