// Copies at every alignment and size: the bytes arrive, and nothing beside them is touched. Without
// a sanitizer this runs the vector paths; with one, the fallback.
#include <cstring>
#include <vector>

#include "host/copy.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

constexpr uint8_t kGuard = 0xA5;
constexpr int64_t kMargin = 320;  // more than any block that a vector path might overrun

class Buffers {
 public:
  explicit Buffers(int64_t max_bytes)
      : from_(max_bytes + 2 * kMargin), to_(from_.size(), kGuard), random_(3) {
    for (uint8_t& byte : from_) byte = static_cast<uint8_t>(random_());
  }

  void check(int64_t to_align, int64_t from_align, int64_t bytes) {
    uint8_t* const to = aligned(to_) + to_align;
    const uint8_t* const from = aligned(from_) + from_align;
    uec::host::stream_copy(to, from, bytes);
    uec::host::store_fence();
    CHECK(std::memcmp(to, from, bytes) == 0);
    for (int64_t i = 1; i <= 64; ++i) CHECK(to[-i] == kGuard && to[bytes + i - 1] == kGuard);
    for (const uint8_t* at = to + bytes; at < to + bytes + 256; ++at) CHECK(*at == kGuard);
    std::memset(to, kGuard, bytes);
  }

 private:
  // 64-byte aligned, with at least 64 bytes before it and 64 + 256 after what is copied.
  static uint8_t* aligned(std::vector<uint8_t>& buffer) {
    const auto at = reinterpret_cast<uintptr_t>(buffer.data());
    return buffer.data() + (64 - at % 64) % 64 + 64;
  }

  std::vector<uint8_t> from_, to_;
  Random random_;
};

}  // namespace

int main() {
  Buffers buffers((256 << 10) + 64);
  for (int64_t bytes = 0; bytes <= 3000; bytes += bytes < 1100 ? 1 : 61)
    for (int64_t to = 0; to < 64; to += kSanitized ? 21 : 5)
      buffers.check(to, (to * 7 + 3) % 64, bytes);
  for (const int64_t bytes : {1023, 1024, 1025, 1087, 1088, 1279, 1280, 1281, 4096, 32768, 65537})
    for (int64_t to = 0; to < 64; to += kSanitized ? 9 : 1)
      for (int64_t from = 0; from < 64; from += kSanitized ? 9 : 1) buffers.check(to, from, bytes);
  buffers.check(1, 0, 256 << 10);
}
