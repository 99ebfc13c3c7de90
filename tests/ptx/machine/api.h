/* The PTX machine as a library that a test program loads at run time. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct PtxLaunch {
  const char* kernel;
  uint32_t blocks, ranks, threads; /* grid: blocks x ranks; threads of a block */
  int64_t shared_bytes;            /* dynamic */
  void** args;                     /* as cuLaunchKernel() takes them; copied */
  int32_t first_rank;              /* of blockIdx.y = 0. Each rank is a device of its own. */
  int32_t together;                /* all blocks are resident at once */
  int32_t beside; /* another kernel of the rank may be running, and is not before it */
};

/* A launch runs while its caller, or that of another, advances the machine: a slice at a time. */
void* ptx_begin(const struct PtxLaunch* launch);
int32_t ptx_advance(void* grid); /* 1: the grid has ended, and `grid` with it */

/* Whose memory it is; -1: the host's. Of a device's, other ranks' accesses take the link. */
void ptx_memory(const void* base, int64_t bytes, int32_t rank);
/* What `rank` uses once its kernel has ended, unless *failed: what others do there comes before. */
void ptx_results(const void* base, int64_t bytes, int32_t rank, const int32_t* failed);
/* NVSHMEM's symmetric memory, by PE. A peer is reached by its functions only. */
void ptx_symmetric(uint8_t* const* bases, int32_t num_pes, int64_t bytes);
void ptx_forget(void); /* all of these */

/* What the last launch that ended did, as JSON. Valid until the next one ends. */
const char* ptx_report(void);

#ifdef __cplusplus
}
#endif
