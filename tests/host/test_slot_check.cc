// Check mode: clean calls pass. Its copies are read by peers while their home continues, so
// ThreadSanitizer watches. Wrong bytes are found in tests/python/group/test_slot_check.py.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "host/slot_check.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Mode;
using uec::host::Damage;

constexpr int32_t kRanks = 3;
const std::vector<int64_t> kSegments{20'000, 3};
// Expert e lives on rank e. Rank 1 has experts 0 and 2; rank 0 has expert 2; rank 2 gets nothing.
const std::vector<int32_t> kPlan{-1, 2, 0, 2, -1, -1};

class Checked {
 public:
  Checked()
      : ranks(make_group(kRanks, kRanks, 2), {.segment_bytes = kSegments, .check = true}),
        payload_(kSegments[0]),
        regions_(ranks.make_weights()) {
    for (int32_t r = 0; r < kRanks; ++r) ranks.fill_slots(r);
  }

  uint64_t submit(int32_t rank, uint64_t seed, bool background, Mode mode = Mode::kDirect) {
    ranks.fill_weights(rank, regions_[rank].get(), payload_, seed);
    const std::vector<uint64_t> main_ptrs = ranks.addresses(rank, regions_[rank].get());
    std::vector<int32_t> plan = kPlan;  // the engine keeps what it compares
    const uint64_t epoch = ranks.replicate(rank, plan, main_ptrs, mode, background, {0, 1});
    std::fill(plan.begin(), plan.end(), 7);
    return epoch;
  }

  void check_slots(int32_t rank, uint64_t seed) {
    for (int32_t s = 0; s < 2; ++s)
      for (size_t i = 0; i < kSegments.size(); ++i)
        ranks.check_slot(rank, s, i, kPlan[rank * 2 + s], payload_, seed);
  }

  Ranks ranks;

 private:
  Payload payload_;
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> regions_;
};

// Weights change at once after each call, and each rank continues as fast as it can.
void check_clean_calls() {
  constexpr uint64_t kCalls = kSanitized ? 100 : 10;  // a race shows in one of some twenty
  Checked checked;
  for (const Mode mode : {Mode::kDirect, Mode::kPush, Mode::kPull}) {
    for (const bool background : {false, true}) {
      checked.ranks.on_each([&](int32_t rank) {
        for (uint64_t seed = 1; seed <= kCalls; ++seed) {
          wait_ok(checked.ranks.engine(rank), checked.submit(rank, seed, background, mode));
          checked.check_slots(rank, seed);
        }
      });
    }
  }
  for (int32_t r = 0; r < kRanks; ++r) {
    CHECK(checked.ranks.engine(r).damage().kind == Damage::kNone);
    CHECK_EQ(checked.ranks.engine(r).close(), -1);
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a call in check mode does not end");
  check_clean_calls();
  return 0;
}
