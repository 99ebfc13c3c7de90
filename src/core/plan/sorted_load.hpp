// A load, sorted for the planner's search, and the search's goal.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "core/plan/probe.hpp"

namespace uec {

// A load, as the search sees it. Borrowed arrays.
//
// Ranks that may hold each other's experts are a pool: a domain, or all ranks where plans may cross
// domains. Pools are numbered by their fullest rank.
struct SortedLoad {
  int32_t num_pools = 0;
  int32_t largest = 0;                  // tokens of the largest expert
  int32_t last_cap = 0;                 // from which on a cap on exports and imports caps nothing
  const int32_t* pool_begin = nullptr;  // [num_pools + 1] where a pool begins in `ranks`
  const int32_t* ranks = nullptr;       // [G] by pool, then descending load, then id
  const int64_t* tokens_before = nullptr;  // [G + 1] tokens of `ranks`, running sums
  const int64_t* load = nullptr;           // [E]
  const int32_t* local_begin = nullptr;    // [G + 1]
  const int32_t* local_experts = nullptr;  // [E] by home; of ranks above the mean by descending
                                           // load, then id

  // Arrays for packed probes, as in Pool but for all pools; null: there are none.
  const int32_t* rank_tokens = nullptr;
  const LocalRow* rows = nullptr;
  const int32_t* local_tokens = nullptr;
  int32_t max_local_experts = 0;

  UEC_HD Pool pool(int32_t p) const {
    const int32_t begin = pool_begin[p];
    Pool pool;
    pool.ranks = ranks + begin;
    pool.num_ranks = pool_begin[p + 1] - begin;
    pool.tokens_before = tokens_before + begin;
    pool.load = load;
    pool.local_begin = local_begin;
    pool.local_experts = local_experts;
    pool.largest = largest;
    if (rank_tokens == nullptr) return pool;
    pool.rank_tokens = rank_tokens + begin;
    pool.rows = rows + begin;
    pool.local_tokens = local_tokens;
    pool.max_local_experts = max_local_experts;
    return pool;
  }
  UEC_HD int64_t pool_mean(int32_t p) const {
    const int32_t begin = pool_begin[p], end = pool_begin[p + 1];
    return ceil_div(tokens_before[end] - tokens_before[begin], end - begin);
  }
};

// How low the fullest rank of a pool is to be brought.
struct Goal {
  int64_t mean;       // tokens that some rank has under any plan: the largest mean of a pool
  int64_t fullest;    // tokens of the fullest rank without replicas
  int64_t threshold;  // by target: tokens of a rank that are few enough
  bool is_met;        // without replicas
  bool is_exact;      // a plan's every rank is to have the mean
};

}  // namespace uec
