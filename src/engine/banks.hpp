// What the slots of a rank's banks hold, as all submitted calls leave it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/base/digest.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/prepare.hpp"

namespace uec::host {

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
    // Bank 0 also has the slots of calls without a bank, which leave it empty.
    State& bank = states_[std::max(args.bank.index, 0)];
    if (args.bank.index >= 0) {
      const uint64_t segments = digest_ints(SingleThread{}, 1, args.segments, args.num_segments);
      expire_residents(SingleThread{}, topology_, args.bank.version, segments, bank.table);
      args.bank.resident = bank.table.resident;
    } else if (bank.last_call != 0) {
      clear_residents(SingleThread{}, topology_, bank.table.resident);
    }
  }
  // Called once it has been prepared, as call `epoch`.
  void note(const ReplicateArgs& args, uint64_t epoch) {
    if (args.bank.index < 0) return;
    note_residents(SingleThread{}, topology_, args.slot_expert, states_[args.bank.index].table);
    states_[args.bank.index].last_call = epoch;
  }

  // The main weights have changed: the bank's next call is of the next version.
  void invalidate(int32_t bank) {
    ++states_[bank].table.version;
    clear_residents(SingleThread{}, topology_, states_[bank].table.resident);
  }

  const std::vector<int32_t>& residents(int32_t bank) const { return states_[bank].resident; }
  uint64_t version(int32_t bank) const { return states_[bank].table.version; }
  uint64_t last_call(int32_t bank) const { return states_[bank].last_call; }  // 0: none

 private:
  struct State {
    BankTable table;
    std::vector<int32_t> resident;  // [G][S]
    uint64_t last_call = 0;
  };
  Topology topology_;
  std::vector<State> states_;
};

}  // namespace uec::host
