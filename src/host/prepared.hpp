// One submitted call with all the arrays it needs, allocated once when the engine is made.
#pragma once

#include <cstdint>
#include <vector>

#include "core/transfer/prepare.hpp"
#include "core/transfer/stripe.hpp"

namespace uec::host {

class Prepared {
 public:
  Prepared(const Capacity& c, int32_t num_workers) : scratch_of_(num_workers) {
    const int64_t call_bytes = CallArrays::cut(nullptr, c, &arrays);
    const int64_t schedule_bytes = ScheduleArrays::cut(nullptr, c, &schedule);
    memory_.resize((call_bytes + schedule_bytes) / 8);
    auto* const base = reinterpret_cast<std::byte*>(memory_.data());
    CallArrays::cut(base, c, &arrays);
    ScheduleArrays::cut(base + call_bytes, c, &schedule);
    arrays.bind_arrays(&call);
    StripeScratch none;
    const int64_t words = StripeScratch::cut(nullptr, c.num_ranks, c.striped(), &none) / 8;
    scratch_.resize(words * num_workers);
    for (int32_t w = 0; w < num_workers; ++w) {
      auto* const at = reinterpret_cast<std::byte*>(scratch_.data() + words * w);
      StripeScratch::cut(at, c.num_ranks, c.striped(), &scratch_of_[w]);
    }
  }

  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  const StripeScratch& scratch(int32_t worker) const { return scratch_of_[worker]; }

  Operation operation = Operation::kReplicate;
  Call call;
  CallArrays arrays;
  ScheduleArrays schedule;
  PlanShape shape;
  std::vector<int32_t> slot_expert;  // check mode: [G][S]
  std::vector<int32_t> resident;     // check mode: [G][S] what a bank's slots hold; empty: no bank
  std::vector<uint8_t> selected;     // check mode: [segments] whether it is transferred
  const int32_t* row = nullptr;      // gather: [E] own counts, borrowed until the call has finished
  int32_t* table = nullptr;          // gather: [G][E] result

 private:
  std::vector<uint64_t> memory_;
  std::vector<uint64_t> scratch_;
  std::vector<StripeScratch> scratch_of_;  // [workers]
};

}  // namespace uec::host
