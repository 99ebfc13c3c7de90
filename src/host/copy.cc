#include "host/copy.hpp"

#include <cstring>

// Sanitizers see memcpy; they do not see vector intrinsics with their own target attribute.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define UEC_STREAM_STORES 1
#include <immintrin.h>
#else
#define UEC_STREAM_STORES 0
#endif

namespace uec::host {

#if UEC_STREAM_STORES
namespace {

constexpr int64_t kSmall = 1024;  // below this, the fence costs more than the cache lines

// Each copies a multiple of 256 bytes to a 64-byte aligned destination.
__attribute__((target("avx512f"))) void stream_blocks_512(char* to, const char* from,
                                                          int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 64);
    const __m512i c = _mm512_loadu_si512(from + i + 128), d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
}

__attribute__((target("avx2"))) void stream_blocks_256(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
  }
}

void stream_blocks_128(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

// Uses the widest stores that every such processor has: nothing is loaded, so memory is the limit.
void zero_blocks(char* to, int64_t bytes) {
  const __m128i zero = _mm_setzero_si128();
  for (int64_t i = 0; i < bytes; i += 64)
    for (int64_t j = 0; j < 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + j), zero);
}

using StreamBlocks = void (*)(char*, const char*, int64_t);

StreamBlocks choose() {
  if (__builtin_cpu_supports("avx512f")) return stream_blocks_512;
  if (__builtin_cpu_supports("avx2")) return stream_blocks_256;
  return stream_blocks_128;
}

const StreamBlocks stream_blocks = choose();

}  // namespace

void stream_copy(void* destination, const void* source, int64_t bytes) {
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  if (bytes < kSmall) {
    std::memcpy(to, from, bytes);
    return;
  }
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
  std::memcpy(to, from, head);
  const int64_t body = (bytes - head) & ~int64_t{255};
  stream_blocks(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

void stream_zero(void* destination, int64_t bytes) {
  char* to = static_cast<char*>(destination);
  if (bytes < kSmall) {
    std::memset(to, 0, bytes);
    return;
  }
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
  std::memset(to, 0, head);
  const int64_t body = (bytes - head) & ~int64_t{63};
  zero_blocks(to + head, body);
  std::memset(to + head + body, 0, bytes - head - body);
}

void store_fence() { _mm_sfence(); }

#else

void stream_copy(void* destination, const void* source, int64_t bytes) {
  std::memcpy(destination, source, bytes);
}

void stream_zero(void* destination, int64_t bytes) { std::memset(destination, 0, bytes); }

// Ordinary stores are ordered by the release store of the publish itself.
void store_fence() {}

#endif

}  // namespace uec::host
