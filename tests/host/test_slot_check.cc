// Check mode: clean calls pass, and one wrong byte is found. Its copies are read by peers while
// their home continues, so ThreadSanitizer watches.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "host/slot_check.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Fault;
using uec::Mode;
using uec::host::Damage;
using uec::host::Engine;

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

  // Rank 0's expert is in rank 1's slot 0; both ranks wait for rank 2's.
  void await_first_slot(uint64_t seed) {
    const auto has = [&](size_t segment) {
      const uint8_t* const at = ranks.slot(1, 0, segment);
      const uint8_t* const should = payload_.of(seed, 0, segment);
      for (int64_t i = 0; i < kSegments[segment]; ++i)
        if (std::atomic_ref(const_cast<uint8_t&>(at[i])).load(std::memory_order_relaxed) !=
            should[i])
          return false;
      return true;
    };
    while (!has(0) || !has(1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  uint8_t* weight(int32_t rank, size_t segment) {
    return ranks.main(regions_[rank].get(), 0, segment);
  }
  uint8_t value(uint64_t seed, int32_t expert, size_t segment, int64_t offset) const {
    return payload_.of(seed, expert, segment)[offset];
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

#if !defined(__SANITIZE_THREAD__)  // what is found here is a race by intention

// Breaks something while ranks 0 and 1 wait for rank 2, and returns what `finder` says of it.
template <class Break>
Damage damage_of(int32_t finder, Break&& break_it) {
  Checked checked;
  const uint64_t zero = checked.submit(0, 5, true), one = checked.submit(1, 5, true);
  checked.await_first_slot(5);
  break_it(checked);
  const uint64_t two = checked.submit(2, 5, true);
  CHECK(!checked.ranks.engine(finder).wait(finder == 0 ? zero : one));
  checked.ranks.engine(0).wait(zero);
  checked.ranks.engine(1).wait(one);
  checked.ranks.engine(2).wait(two);
  const uec::Report report = checked.ranks.engine(finder).report();
  CHECK(report.fault == Fault::kDamaged);
  CHECK(report.epoch == 1 && report.root == finder);
  for (int32_t r = 0; r < kRanks; ++r) checked.ranks.engine(r).close();
  return checked.ranks.engine(finder).damage();
}

void check_damage() {
  for (const int64_t offset :
       {int64_t{0}, uec::kCheckBlock - 1, uec::kCheckBlock, int64_t{19'999}}) {
    uint8_t good = 0;
    const Damage slot = damage_of(1, [&](Checked& c) {
      good = c.value(5, 0, 0, offset);
      c.ranks.slot(1, 0, 0)[offset] ^= 0x80;
    });
    CHECK(slot.kind == Damage::kSlot && slot.home == 0 && slot.expert == 0 && slot.slot == 0);
    CHECK_EQ(slot.segment, 0);
    CHECK_EQ(slot.offset, offset);
    CHECK(slot.expected == good && slot.found == (good ^ 0x80) && !slot.source_changed);
  }

  const Damage empty = damage_of(0, [](Checked& c) { c.ranks.slot(0, 0, 1)[2] = 1; });
  CHECK(empty.kind == Damage::kUntouched && empty.expert == -1 && empty.slot == 0);
  CHECK(empty.segment == 1 && empty.offset == 2);
  CHECK(empty.found == 1 && empty.expected == Ranks::kUntouched);

  const Damage source = damage_of(0, [](Checked& c) { c.weight(0, 0)[12'345] ^= 1; });
  CHECK(source.kind == Damage::kSource && source.source_changed && source.expert == 0);
  CHECK(source.segment == 0 && source.offset == 12'345 && source.slot == -1);
}

#endif

}  // namespace

int main() {
  const Watchdog watchdog("a call in check mode does not end");
  check_clean_calls();
#if !defined(__SANITIZE_THREAD__)
  check_damage();
#endif
  return 0;
}
