// Loads of an emulated group: ids of every rank, launches of the load kernel, and what they leave.
#pragma once

#include <vector>

#include "core/plan/counts.hpp"
#include "cuda/device/load.cuh"
#include "device/emulated_group.hpp"

namespace device_tests {

// Ids at an address that is `skew` of them beyond an aligned one.
class Ids {
 public:
  Ids(const std::vector<int64_t>& values, int32_t id_bytes, int32_t skew)
      : values_(values),
        id_bytes_(id_bytes),
        memory_(static_cast<int64_t>(values.size()) * id_bytes, int64_t{skew} * id_bytes) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto narrow = static_cast<int32_t>(values[i]);
      if (id_bytes == 4)
        std::memcpy(memory_.data() + i * 4, &narrow, 4);
      else
        std::memcpy(memory_.data() + i * 8, &values[i], 8);
    }
  }
  const std::vector<int64_t>& values() const { return values_; }
  int32_t id_bytes() const { return id_bytes_; }
  uint64_t address() { return reinterpret_cast<uint64_t>(memory_.data()); }
  int64_t count() const { return static_cast<int64_t>(values_.size()); }

 private:
  std::vector<int64_t> values_;
  int32_t id_bytes_;
  Buffer memory_;
};

inline std::vector<int64_t> draw_ids(Random& random, int32_t num_experts, int32_t count) {
  std::vector<int64_t> ids(count);
  const int32_t hot = draw(random, 0, num_experts - 1);
  for (int64_t& id : ids)
    id = draw(random, 0, 3) == 0 ? hot : draw(random, -1, num_experts - 1);  // -1: padding
  return ids;
}

struct LoadShape {
  int32_t num_blocks = 1, num_warps = 2;
};

class EmulatedLoad {
 public:
  explicit EmulatedLoad(EmulatedGroup& ranks) : ranks_(ranks) {}

  // Gives every rank ids of its own for the next call. Tables begin up to `skew` words off.
  void draw(Random& random, int32_t skew = 3) {
    ids_.clear();
    tables_.clear();
    for (int32_t r = 0; r < num_ranks(); ++r) {
      const int32_t count = ::draw(random, 0, 5) == 0 ? 0 : ::draw(random, 0, 90);
      give(r, draw_ids(random, num_experts(), count), ::draw(random, 0, 1) == 0 ? 4 : 8,
           ::draw(random, 0, 3));
      tables_.push_back(std::make_unique<Buffer>(4 * entries() + 4, 4 * ::draw(random, 0, skew)));
    }
    epoch_ = ranks_.begin_call();
    digest_ = uec::mix(ranks_.state(0).digest, static_cast<uint64_t>(uec::Operation::kGather));
  }
  void give(int32_t rank, const std::vector<int64_t>& values, int32_t id_bytes, int32_t skew) {
    auto ids = std::make_unique<Ids>(values, id_bytes, skew);
    if (rank < static_cast<int32_t>(ids_.size()))
      ids_[rank] = std::move(ids);
    else
      ids_.push_back(std::move(ids));
  }

  uec::cuda::LoadArgs args(int32_t first, int32_t count) {
    uec::cuda::LoadArgs args;
    args.states = reinterpret_cast<uint64_t>(&ranks_.state(first));
    for (int32_t i = 0; i < count; ++i) {
      Ids& ids = *ids_[first + i];
      std::fill_n(table(first + i), entries() + 1, kUntouched);
      args.calls[i] = {ids.address(), ids.count(), reinterpret_cast<uint64_t>(table(first + i)),
                       ids.id_bytes()};
    }
    return args;
  }

  // `count` ranks of the group, in one launch.
  void launch(const LoadShape& shape, int32_t first, int32_t count) {
    const uec::cuda::LoadArgs arguments = args(first, count);
    const bool far = ranks_.options().far;
    emulation::launch(far ? "ultraep_load_far" : "ultraep_load", arguments,
                      {.blocks = shape.num_blocks,
                       .ranks = count,
                       .shared_bytes = uec::cuda::load_shared_bytes(num_ranks(), num_experts()),
                       .warps = shape.num_warps,
                       .first_rank = first},
                      [&](std::byte* memory) {
                        if (far)
                          uec::cuda::load<true>(arguments, memory);
                        else
                          uec::cuda::load<false>(arguments, memory);
                      });
  }
  void launch(const LoadShape& shape) { launch(shape, 0, num_ranks()); }

  // Every rank in its own launch.
  void launch_apart(const LoadShape& shape) {
    Fibers ranks;
    for (int32_t r = 0; r < num_ranks(); ++r)
      ranks.spawn([this, shape, r] { launch(shape, r, 1); });
    ranks.wait();
  }

  std::vector<int32_t> expected() const {
    std::vector<int32_t> load(entries());
    for (int32_t r = 0; r < num_ranks(); ++r)
      CHECK_EQ(uec::count_experts(ids_[r]->values().data(), ids_[r]->count(), num_experts(),
                                  load.data() + r * num_experts()),
               -1);
    return load;
  }

  void check_success() {
    ranks_.check_states();
    const std::vector<int32_t> load = expected();
    for (int32_t r = 0; r < num_ranks(); ++r) {
      CHECK(std::equal(load.begin(), load.end(), table(r)));
      CHECK_EQ(table(r)[entries()], kUntouched);
      CHECK_EQ(ranks_.state(r).digest, digest_);
      CHECK_EQ(ranks_.state(r).last_record,
               uec::CallRecord::make(epoch_, digest_, uec::RecordKind::kCall).word);
      check_left_ready(r);
    }
  }

  // Also after a failure.
  void check_left_ready(int32_t r) {
    CHECK_EQ(ranks_.state(r).left, 0);
    CHECK_EQ(ranks_.state(r).entered, 0);
    CHECK_EQ(ranks_.state(r).bad_id, uint64_t{0});
    for (const int32_t count : ranks_.counts(r)) CHECK_EQ(count, 0);
  }

  int32_t* table(int32_t r) { return reinterpret_cast<int32_t*>(tables_[r]->data()); }
  int32_t num_ranks() const { return ranks_.group().num_ranks; }
  int32_t num_experts() const { return ranks_.group().num_experts; }
  int64_t entries() const { return int64_t{num_ranks()} * num_experts(); }

  static constexpr int32_t kUntouched = 0x5A5A5A5A;

 private:
  EmulatedGroup& ranks_;
  uint64_t epoch_ = 0, digest_ = 0;  // of the present call
  std::vector<std::unique_ptr<Ids>> ids_;
  std::vector<std::unique_ptr<Buffer>> tables_;
};

}  // namespace device_tests
