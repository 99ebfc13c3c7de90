// A driver without GPUs: libcuda.so.1 and libnvidia-ml.so.1 in one, told by the environment what to
// say. CUDA sees FAKE_DEVICES of the five that NVML sees. Of 18 NVLinks one is down.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

bool is(const char* name, const char* value) {
  const char* text = std::getenv(name);
  return text != nullptr && std::strcmp(text, value) == 0;
}

int index_of(void* handle) { return static_cast<int>(reinterpret_cast<long>(handle)) - 100; }

struct Field {
  unsigned id, scope;
  long long timestamp, latency;
  int type, error;
  unsigned value;
};

struct Pci {
  char legacy[16];
  unsigned numbers[5];
  char id[32];
};

struct Fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

}  // namespace

extern "C" {

// ---- libcuda

int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}

int cuInit(unsigned) {
  while (is("FAKE_INIT", "hang")) pause();
  if (is("FAKE_INIT", "crash")) std::raise(SIGSEGV);
  return number("FAKE_INIT", 0);
}

int cuGetErrorName(int error, const char** name) {
  *name = error == 100   ? "CUDA_ERROR_NO_DEVICE"
          : error == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY"
                         : nullptr;
  return *name == nullptr;
}

int cuDeviceGetCount(int* count) {
  dprintf(1, "a driver that talks ");
  *count = number("FAKE_DEVICES", 1);
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

int cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, length, "Fake H");
  return 0;
}

int cuDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, length, "0000:%dB:00.0", device);
  return 0;
}

int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = std::size_t{80} << 30;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int mode = number("FAKE_COMPUTE_MODE", 0);
  const int known[][2] = {{16, 132}, {20, mode}, {75, 9}, {76, 0}, {95, 1}, {128, 1}, {133, 1}};
  for (const auto& [name, answer] : known) {
    if (name != attribute) continue;
    *value = answer;
    return attribute == 133 && !is("FAKE_MPS", "1");  // an old driver does not know it
  }
  return 1;
}

int cuDeviceCanAccessPeer(int* reaches, int from, int to) {
  *reaches = !(from + to == 3 && is("FAKE_APART", "1"));
  return 0;
}

// ---- NVML

int nvmlInit_v2() { return number("FAKE_NVML", 0); }

const char* nvmlErrorString(int) { return "Driver/library version mismatch"; }

int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::snprintf(version, length, "580.1");
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 5;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(100L + index);
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  int bus = 0;
  if (std::sscanf(id, "0000:%dB:00.0", &bus) != 1) return 2;
  *handle = reinterpret_cast<void*>(104L - bus);
  return 0;
}

int nvmlDeviceGetPciInfo_v3(void* handle, Pci* pci) {
  std::snprintf(pci->id, sizeof pci->id, "00000000:%dB:00.0", 4 - index_of(handle));
  return 0;
}

int nvmlDeviceGetMigMode(void*, unsigned* current, unsigned* pending) {
  *current = *pending = is("FAKE_MIG", "1");
  return 0;
}

int nvmlDeviceGetNvLinkState(void*, unsigned link, int* active) {
  *active = link != 2 && !is("FAKE_BRIDGES", "0");
  return link < 18 ? 0 : 2;
}

int nvmlDeviceGetFieldValues(void*, int count, Field* field) {
  field->error = field->id == 90 && count == 1 ? 0 : 3;
  field->value = 26562;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, Fabric* fabric) {
  if (fabric->version != (sizeof(Fabric) | 2 << 24)) return 25;
  fabric->state = number("FAKE_FABRIC", 2);
  fabric->status = number("FAKE_FABRIC_STATUS", 0);
  fabric->cluster[15] = number("FAKE_CLUSTER", 0);
  fabric->clique = 7;
  return 0;
}

int nvmlDeviceGetP2PStatus(void* from, void* to, int kind, int* status) {
  *status = kind == 2 && index_of(from) + index_of(to) != 7 ? 0 : 5;
  return 0;
}

}  // extern "C"
