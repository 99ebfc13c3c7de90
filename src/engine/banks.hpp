// What the slots of a rank's banks hold, as all submitted calls leave it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/base/digest.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/prepare.hpp"

namespace uec {

// Needs external synchronisation: an engine calls it under the lock that orders its calls.
class Banks {
 public:
  Banks(const Topology& topology, int32_t count) : topology_(topology), states_(count) {
    for (State& bank : states_) {
      bank.resident.assign(int64_t{topology.num_ranks} * topology.slots_per_rank, -1);
      bank.table.resident = bank.resident.data();
    }
  }

  // Called before a transfer is prepared: drops residents of another version or of other segments,
  // and gives the call the rest.
  void enter(ReplicateArgs& args) {
    State& bank = state(args.bank.index);
    if (args.bank.index >= 0) {
      bank.version = args.bank.version;
      const uint64_t segments = digest_ints(SingleThread{}, 1, args.segments, args.num_segments);
      expire_residents(SingleThread{}, topology_, bank.version, segments, bank.table);
      args.bank.resident = bank.table.resident;
    } else if (bank.last_call != 0) {
      clear_residents(SingleThread{}, topology_, bank.table.resident);
    }
  }
  // Called once it has been prepared, as call `epoch`.
  void note(const ReplicateArgs& args, uint64_t epoch) {
    if (args.bank.index < 0) return;
    State& bank = state(args.bank.index);
    note_residents(SingleThread{}, topology_, args.slot_expert, bank.table);
    bank.last_call = epoch;
  }

  // Both for a call whose plan is on the device; null: the host does not know the plan. `segments`:
  // bits. `capture`: the one that it is in, which numbers its calls itself; 0: none.
  void note_on_device(int32_t index, uint64_t segments, const int32_t* slot_expert, uint64_t call,
                      uint64_t capture) {
    State& bank = state(index);
    if (capture == 0) {
      bank.last_call = call;
    } else {
      bank.last_captured = call;
      bank.capture = capture;
    }
    if (index < 0) {
      clear(bank);
      return;
    }
    bank.known = bank.known && slot_expert != nullptr && capture == 0;
    if (!bank.known) return;
    expire_residents(SingleThread{}, topology_, bank.version, segments, bank.table);
    note_residents(SingleThread{}, topology_, slot_expert, bank.table);
  }
  // What the device's table is, after all calls.
  void learn(int32_t index, uint64_t version, uint64_t segments,
             const std::vector<int32_t>& resident) {
    State& bank = states_[index];
    bank.table.version = version;
    bank.table.segments = segments;
    std::copy(resident.begin(), resident.end(), bank.resident.begin());
    bank.known = bank.capture == 0;
  }

  // The bank is empty, and its next call is of this version of the main weights.
  void set_version(int32_t index, uint64_t version, uint64_t capture = 0) {
    State& bank = states_[index];
    bank.version = version;
    if (capture != 0 && capture != bank.capture) {
      bank.capture = capture;
      bank.last_captured = 0;
    }
    clear(bank);
  }
  // The main weights have changed.
  void invalidate(int32_t index) { set_version(index, version(index) + 1); }

  // What the slots hold; not, where the host does not know it: never, where graphs may be replayed.
  const std::vector<int32_t>& residents(int32_t index) const { return states_[index].resident; }
  bool is_known(int32_t index) const { return states_[index].known; }
  uint64_t version(int32_t index) const { return states_[index].version; }
  // The last call for the bank, of a capture or of none; 0: there was none.
  uint64_t last_call(int32_t index, uint64_t capture = 0) const {
    const State& bank = states_[index];
    if (capture == 0) return bank.last_call;
    return bank.capture == capture ? bank.last_captured : 0;
  }

 private:
  struct State {
    uint64_t version = 0;  // of the next call's weights
    BankTable table;
    std::vector<int32_t> resident;  // [G][S]
    bool known = true;
    uint64_t last_call = 0;
    uint64_t last_captured = 0;
    uint64_t capture = 0;  // that this was in; 0: there was none
  };

  // Bank 0 also has the slots of calls without a bank (-1), which leave it empty.
  State& state(int32_t index) { return states_[std::max(index, 0)]; }
  void clear(State& bank) {
    clear_residents(SingleThread{}, topology_, bank.table.resident);
    bank.known = bank.capture == 0;
  }

  Topology topology_;
  std::vector<State> states_;
};

}  // namespace uec
