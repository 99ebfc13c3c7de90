// Arguments of slot_gemm().
#pragma once

#include <cstdint>

struct SlotGemm {
  const uint64_t* ready;      // group.banks[i].ready
  const int8_t* slots;        // [S][n][k] group.banks[i].slots["w"]
  const int8_t* tokens;       // [num_tokens][k]
  int32_t* out;               // [S][num_tokens][n]
  const int32_t* slots_used;  // [num_slots]
  uint64_t number;            // work.epoch
  uint64_t timeout_ns;        // 0: no limit
  int32_t num_tokens, n, k;   // k: a multiple of 4
  int32_t blocks_per_slot;
};
