// One submitted call with all the arrays it needs, allocated once when the engine is made.
#pragma once

#include <cstdint>
#include <vector>

#include "core/transfer/prepare.hpp"

namespace uec::host {

class Prepared {
 public:
  Prepared(const Capacity& c, int32_t num_workers) : num_ranks_(c.num_ranks) {
    const int64_t call_bytes = CallArrays::cut(nullptr, c, &arrays);
    const int64_t schedule_bytes = ScheduleArrays::cut(nullptr, c, &schedule);
    memory_.resize((call_bytes + schedule_bytes) / 8);
    auto* const base = reinterpret_cast<std::byte*>(memory_.data());
    CallArrays::cut(base, c, &arrays);
    ScheduleArrays::cut(base + call_bytes, c, &schedule);
    arrays.lend_to(&call);
    worker_bytes_ = c.num_ranks + c.claimed();
    scratch_.resize(worker_bytes_ * num_workers);
  }

  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  // Scratch of one worker: [num_ranks] and [num_pieces or num_reductions] bytes.
  uint8_t* open(int32_t worker) { return scratch_.data() + worker_bytes_ * worker; }
  uint8_t* state(int32_t worker) { return open(worker) + num_ranks_; }

  Operation operation = Operation::kReplicate;
  Call call;
  CallArrays arrays;
  ScheduleArrays schedule;
  PlanShape shape;
  std::vector<int32_t> slot_expert;  // check mode: [G][S]
  std::vector<uint8_t> selected;     // check mode: [segments] whether it is transferred
  const int32_t* row = nullptr;      // gather: [E] own counts, borrowed until the call has finished
  int32_t* table = nullptr;          // gather: [G][E] result

 private:
  std::vector<uint64_t> memory_;
  int32_t num_ranks_;
  int64_t worker_bytes_ = 0;
  std::vector<uint8_t> scratch_;
};

}  // namespace uec::host
