// The ring of stages between a worker's two sides.
//
// Fetches and stages are counted without wrapping: fetch k uses stage k modulo the number of
// stages. Its life: the fetch side finds it vacant, describes it and starts its load; once loaded,
// the store side stores from it; once the stores have read it, the store side releases it.
#pragma once

#include "core/base/bounds.hpp"
#include "core/base/common.hpp"
#include "core/schedule/tiles.hpp"

namespace uec {

// What is in a stage: one tile, or (`piece` < 0) the end of all.
struct Stage {
  TileSpan span;
  int32_t piece;
  int32_t group;
  int32_t share;  // of a worker's last tile of a task: how many groups it had; of other groups'
                  // last tiles 0; else -1

  UEC_HD bool ends_stream() const { return piece < 0; }
  UEC_HD bool ends_group() const { return share >= 0; }
};

// A group whose stores are committed, but which is not yet published.
struct UnpublishedGroup {
  int32_t piece, group, share;
  uint32_t ticket;
};

// The bookkeeping of a ring whose two sides run in one thread. Movers of such workers derive from
// it.
template <uint32_t kNumStages>
class LocalRing {
 public:
  static constexpr uint32_t kStages = kNumStages;

  bool vacant(uint32_t k) const { return k - released_ < kStages; }
  const Stage& stage(uint32_t k) const { return stages_[k % kStages]; }
  void release(uint32_t k) { released_ = k + 1; }

 protected:
  void describe(uint32_t k, const Stage& stage) {
    stages_[k % kStages] = stage;
    described_ = k + 1;
  }
  bool described(uint32_t k) const { return k != described_; }

 private:
  Stage stages_[kStages] = {};
  uint32_t described_ = 0, released_ = 0;
};

}  // namespace uec
