// The kernel's side of ready.cuh: publishes which of this rank's slots may be read.
#pragma once

#include "core/transfer/announce.hpp"
#include "core/transfer/bank.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/ready.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

UEC_DEVICE uint64_t* slot_words(const RankState& known, int32_t bank) {
  return known.slot_words + int64_t{max32(bank, 0)} * known.capacity.slots_per_rank;
}

// What words are set to: more than the host's number of the call. Replays have none, and take that
// of the call before them.
UEC_DEVICE uint64_t slot_number(const RankState& known, int64_t has_call_number) {
  return known.last_call + static_cast<uint64_t>(has_call_number) + 1;
}

// By a warp, ahead of note_residents(): slots that hold what the plan has there stay as they are.
UEC_DEVICE_NOINLINE void publish_residents(const RankState& known, const int32_t* slot_expert,
                                           const BankTable& table, int32_t bank,
                                           int64_t has_call_number) {
  const int32_t slots = known.capacity.slots_per_rank, begin = known.rank * slots;
  for (int32_t s = Warp::index(); s < slots; s += Warp::size()) {
    const int32_t expert = slot_expert[begin + s];
    // Release: what filled them comes before this kernel.
    if (expert >= 0 && table.resident[begin + s] == expert)
      ptx::store_release_device(slot_words(known, bank) + s, slot_number(known, has_call_number));
  }
  ptx::sync_warp();  // the table changes now
}

// By a warp, whose members have observed the flags so far, and have synchronised since, in
// Finish::step(); `all`: every one that is expected.
template <class Memory>
UEC_DEVICE_NOINLINE void publish_filled(const BlockCall& block, int32_t slots, uint64_t* words,
                                        uint64_t number, bool all) {
  const Memory memory(block);
  const Call& call = block.call;
  for (int32_t s = Warp::index(); s < slots; s += Warp::size()) {
    if (ptx::load_acquire_device(words + s) == number) continue;
    bool is_filled = false, is_complete = true;
    for (int32_t i = 0; i < call.work.num_expected && is_complete; ++i) {
      const Expected& e = call.work.expected[i];
      if (e.kind != Expected::kDone || e.idx != s) continue;
      is_filled = true;
      if (all) continue;
      const int64_t done = call.layout.done(e.idx, e.peer);
      is_complete = memory.observe(done) == call.epoch.number;
      if (is_complete) arrived(memory, e.peer, done, call.epoch.number);
    }
    // Release: pairs with wait_slot(). Every sender's stores come before its `done`.
    if (is_filled && is_complete) ptx::store_release_device(words + s, number);
  }
}

// Finish, which also publishes each slot as soon as it is complete.
template <class Memory>
class FinishSlots {
 public:
  UEC_DEVICE FinishSlots(const BlockCall& block, Memory& memory, const RankState& known,
                         int32_t bank, int64_t has_call_number)
      : finish_(block.call, memory),
        block_(block),
        known_(known),
        bank_(bank),
        has_call_number_(has_call_number) {}

  UEC_DEVICE Step step() {
    const Step step = finish_.step();
    const bool all = step == Step::kFinished;
    if (block_.call.work.num_expected > 0 && (all || step == Step::kProgress))
      publish_filled<Memory>(block_, known_.capacity.slots_per_rank, slot_words(known_, bank_),
                             slot_number(known_, has_call_number_), all);
    return step;
  }
  UEC_DEVICE Fault fault() const { return finish_.fault(); }
  UEC_DEVICE Wait wait() { return finish_.wait(); }

 private:
  Finish<Memory> finish_;
  const BlockCall& block_;
  const RankState& known_;
  int32_t bank_;
  int64_t has_call_number_;
};

// By one thread of a rank that has failed.
UEC_DEVICE void release_slots(const RankState& state) {
  const int32_t count = state.capacity.num_banks * state.capacity.slots_per_rank;
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i)
    ptx::store_release_device(slot_words(state, 0) + i, kGroupFailed);
}

}  // namespace uec::cuda
