/* An emulated AMD SMI library: eight MI300X per node, under the real `amdsmi` Python package.
 *
 * What it simulates: the handles of the logical GPUs in SPX, DPX, QPX and CPX with NPS1; the switch of the compute mode,
 * after which every handle is stale until the library is started anew; modes that only partition 0 of a GPU reports; BDF,
 * KFD node, HIP index, UUID, NUMA node and memory of each logical GPU; the answers BUSY, NO_PERM and SETTING_UNAVAILABLE,
 * a switch that reports success and changes nothing, a slow switch, and a node whose 64th device is missing.
 * What it does not: any GPU. The figures are those of the data sheet; all partitions of a GPU show the UUID of the GPU;
 * memory modes (NPS) cannot be switched; processes on a GPU are not seen.
 *
 * The state of a node is the text file STATE_FOLDER/<node>.state, read at amdsmi_init and at every set; STATE_FOLDER/<node>.log
 * gets one line per set: time, process, Slurm job, GPU, mode before, mode asked, answer. The node is $SLURMD_NODENAME
 * (daemons, prologs and job steps have it), else $AMDSMI_EMULATED_NODE, else "local".
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8, CPU_NUMA_NODES = 2, VRAM_GIB = 192, COMPUTE_UNITS = 304 };

typedef enum {
    SUCCESS = 0,
    INVAL = 1,
    NOT_SUPPORTED = 2,
    NO_PERM = 10,
    IO = 12,
    BUSY = 30,
    NOT_FOUND = 31,
    NOT_INIT = 32,
    SETTING_UNAVAILABLE = 55,
} status_t;

/* index = AmdSmiComputePartitionType; MI300X has no TPX */
static const char *const MODE_NAME[] = {"INVALID", "SPX", "DPX", "TPX", "QPX", "CPX"};
static const uint32_t MODE_PARTITIONS[] = {0, 1, 2, 0, 4, 8};
enum { MODES = 6, TPX = 3 };

struct state {
    uint32_t mode[GPUS];
    int busy;      /* that many set calls are answered BUSY */
    int no_perm;   /* set calls are refused */
    int stuck;     /* set calls report success and change nothing */
    int hide_last; /* the 64th device is missing */
    int delay_ms;  /* time of one switch */
};

static struct state seen;            /* what amdsmi_init found */
static uintptr_t generation = 1;     /* of handles: a switch makes all of them stale */
static int started = 0;

/* ---- the state file ---- */

static const char *node_name(void) {
    const char *name = getenv("SLURMD_NODENAME");
    if (!name) name = getenv("AMDSMI_EMULATED_NODE");
    return name ? name : "local";
}

static FILE *open_locked(const char *suffix, const char *how) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%s", STATE_FOLDER, node_name(), suffix);
    FILE *file = fopen(path, how);
    if (file) flock(fileno(file), LOCK_EX);
    return file;
}

static uint32_t mode_by_name(const char *name) {
    for (uint32_t mode = 1; mode < MODES; mode++)
        if (strcmp(name, MODE_NAME[mode]) == 0) return mode;
    return 0;
}

static void read_state(FILE *file, struct state *state) {
    char key[32], value[32];
    memset(state, 0, sizeof *state);
    rewind(file);
    while (fscanf(file, "%31s %31s", key, value) == 2) {
        int number = atoi(value);
        if (strncmp(key, "gpu", 3) == 0 && key[3] >= '0' && key[3] < '0' + GPUS) state->mode[key[3] - '0'] = mode_by_name(value);
        else if (strcmp(key, "busy") == 0) state->busy = number;
        else if (strcmp(key, "no_perm") == 0) state->no_perm = number;
        else if (strcmp(key, "stuck") == 0) state->stuck = number;
        else if (strcmp(key, "hide_last") == 0) state->hide_last = number;
        else if (strcmp(key, "delay_ms") == 0) state->delay_ms = number;
    }
}

static void write_state(FILE *file, const struct state *state) {
    rewind(file);
    if (ftruncate(fileno(file), 0) != 0) abort();
    for (int gpu = 0; gpu < GPUS; gpu++) fprintf(file, "gpu%d %s\n", gpu, MODE_NAME[state->mode[gpu]]);
    fprintf(file, "busy %d\nno_perm %d\nstuck %d\nhide_last %d\ndelay_ms %d\n", state->busy, state->no_perm, state->stuck,
            state->hide_last, state->delay_ms);
    fflush(file);
}

static void record_set(uint32_t gpu, uint32_t before, uint32_t asked, status_t answer) {
    struct timespec now;
    const char *job = getenv("SLURM_JOB_ID");
    FILE *file = open_locked("log", "a");
    if (!file) return;
    clock_gettime(CLOCK_REALTIME, &now);
    fprintf(file, "%lld.%03ld %d %s %u %s %s %d\n", (long long)now.tv_sec, now.tv_nsec / 1000000, (int)getpid(), job ? job : "-",
            gpu, MODE_NAME[before], MODE_NAME[asked], answer);
    fclose(file);
}

/* ---- handles: generation | GPU | partition ---- */

static uint32_t partitions_of(uint32_t gpu) {
    uint32_t count = MODE_PARTITIONS[seen.mode[gpu]];
    return seen.hide_last && gpu == GPUS - 1 && count == 8 ? count - 1 : count;
}

static status_t resolve(void *handle, uint32_t *gpu, uint32_t *partition) {
    uintptr_t value = (uintptr_t)handle;
    *gpu = value >> 8 & 0xff;
    *partition = value & 0xff;
    if (!started) return NOT_INIT;
    if (value >> 16 != generation || *gpu >= GPUS || *partition >= partitions_of(*gpu)) return NOT_FOUND;
    return SUCCESS;
}

#define RESOLVE(handle)                                     \
    uint32_t gpu, partition;                                \
    status_t resolved = resolve(handle, &gpu, &partition);  \
    if (resolved != SUCCESS) return resolved

static uint32_t index_of(uint32_t gpu, uint32_t partition) {
    uint32_t index = partition;
    for (uint32_t before = 0; before < gpu; before++) index += partitions_of(before);
    return index;
}

status_t amdsmi_init(uint64_t flags) {
    (void)flags;
    FILE *file = open_locked("state", "r");
    if (!file) return IO;
    read_state(file, &seen);
    fclose(file);
    generation++;
    started = 1;
    return SUCCESS;
}

status_t amdsmi_shut_down(void) {
    started = 0;
    return SUCCESS;
}

status_t amdsmi_get_socket_handles(uint32_t *count, void **handles) {
    if (!started) return NOT_INIT;
    for (uint32_t gpu = 0; handles && gpu < *count && gpu < GPUS; gpu++) handles[gpu] = (void *)(uintptr_t)(gpu + 1);
    *count = GPUS;
    return SUCCESS;
}

status_t amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    uint32_t gpu = (uint32_t)(uintptr_t)socket - 1;
    if (!started) return NOT_INIT;
    if (gpu >= GPUS) return INVAL;
    for (uint32_t part = 0; handles && part < *count && part < partitions_of(gpu); part++)
        handles[part] = (void *)(generation << 16 | (uintptr_t)gpu << 8 | part);
    *count = partitions_of(gpu);
    return SUCCESS;
}

/* ---- modes ---- */

status_t amdsmi_get_gpu_compute_partition(void *handle, char *text, uint32_t length) {
    RESOLVE(handle);
    if (partition != 0) return NOT_SUPPORTED;
    snprintf(text, length, "%s", MODE_NAME[seen.mode[gpu]]);
    return SUCCESS;
}

status_t amdsmi_get_gpu_memory_partition(void *handle, char *text, uint32_t length) {
    RESOLVE(handle);
    if (partition != 0) return NOT_SUPPORTED;
    snprintf(text, length, "NPS1");
    return SUCCESS;
}

status_t amdsmi_set_gpu_compute_partition(void *handle, uint32_t mode) {
    struct state state;
    status_t answer = SUCCESS;
    RESOLVE(handle);
    if (mode == 0 || mode >= MODES || partition != 0) return INVAL;
    FILE *file = open_locked("state", "r+");
    if (!file) return IO;
    read_state(file, &state);
    uint32_t before = state.mode[gpu];
    if (state.no_perm) answer = NO_PERM;
    else if (mode == TPX) answer = SETTING_UNAVAILABLE;
    else if (state.busy > 0) {
        state.busy--;
        answer = BUSY;
    } else if (!state.stuck && before != mode) {
        struct timespec pause = {state.delay_ms / 1000, state.delay_ms % 1000 * 1000000L};
        nanosleep(&pause, NULL);
        state.mode[gpu] = mode;
        generation++;
    }
    write_state(file, &state);
    record_set(gpu, before, mode, answer);
    fclose(file);
    return answer;
}

struct profile {
    uint32_t type, partitions, memory_caps, index, resources;
    uint32_t resource[8][32];
    uint64_t reserved[13];
};
struct resource_profile {
    uint32_t index, type, share, sharers;
    uint64_t reserved[6];
};
struct profile_config {
    uint32_t profiles, resource_profiles;
    struct resource_profile resource_profile[32];
    uint32_t default_profile;
    struct profile profile[32];
    uint64_t reserved[30];
};
_Static_assert(sizeof(struct profile) == 1152, "amdsmi_accelerator_partition_profile_t");
_Static_assert(sizeof(struct profile_config) == 39168, "amdsmi_accelerator_partition_profile_config_t");

status_t amdsmi_get_gpu_accelerator_partition_profile_config(void *handle, struct profile_config *config) {
    enum { NPS1 = 1, NPS2 = 2, NPS4 = 4 };
    static const uint32_t type[] = {1, 2, 4, 5}, memory[] = {NPS1, NPS1 | NPS2, NPS1 | NPS4, NPS1 | NPS4};
    RESOLVE(handle);
    if (partition != 0) return NOT_SUPPORTED;
    memset(config, 0, sizeof *config);
    config->profiles = 4;
    for (uint32_t index = 0; index < config->profiles; index++) {
        struct profile *profile = &config->profile[index];
        profile->type = type[index];
        profile->partitions = MODE_PARTITIONS[type[index]];
        profile->memory_caps = memory[index];
        profile->index = index;
    }
    return SUCCESS;
}

/* ---- what a logical GPU is ---- */

struct kfd_info {
    uint64_t id;
    uint32_t node, partition;
    uint32_t reserved[12];
};
struct enumeration_info {
    uint32_t drm_render, drm_card, hsa_id, hip_id;
    char hip_uuid[256];
};
struct asic_info {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id, compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id;
    uint32_t reserved[21];
};
_Static_assert(sizeof(struct kfd_info) == 64, "amdsmi_kfd_info_t");
_Static_assert(sizeof(struct enumeration_info) == 272, "amdsmi_enumeration_info_t");
_Static_assert(sizeof(struct asic_info) == 896, "amdsmi_asic_info_t");

status_t amdsmi_get_gpu_kfd_info(void *handle, struct kfd_info *info) {
    RESOLVE(handle);
    memset(info, 0, sizeof *info);
    info->id = 0x1000 + index_of(gpu, partition);
    info->node = CPU_NUMA_NODES + index_of(gpu, partition);
    info->partition = partition;
    return SUCCESS;
}

status_t amdsmi_get_gpu_enumeration_info(void *handle, struct enumeration_info *info) {
    RESOLVE(handle);
    memset(info, 0, sizeof *info);
    info->hip_id = index_of(gpu, partition);
    info->drm_render = 128 + info->hip_id;
    info->drm_card = info->hip_id;
    info->hsa_id = CPU_NUMA_NODES + info->hip_id;
    snprintf(info->hip_uuid, sizeof info->hip_uuid, "GPU-%016x", 0xa300 + gpu);
    return SUCCESS;
}

status_t amdsmi_get_gpu_device_uuid(void *handle, uint32_t *length, char *uuid) {
    RESOLVE(handle);
    snprintf(uuid, *length, "%08xff-74a1-1000-8000-%012x", 0xa300 + gpu, 0);
    return SUCCESS;
}

status_t amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) {
    RESOLVE(handle);
    *bdf = (uint64_t)partition | (uint64_t)(0x05 + 0x10 * gpu) << 8; /* function | device 0 | bus */
    return SUCCESS;
}

status_t amdsmi_topo_get_numa_node_number(void *handle, uint32_t *numa) {
    RESOLVE(handle);
    *numa = gpu * CPU_NUMA_NODES / GPUS;
    return SUCCESS;
}

status_t amdsmi_get_gpu_memory_total(void *handle, uint32_t type, uint64_t *bytes) {
    RESOLVE(handle);
    if (partition != 0 || type != 0) return NOT_SUPPORTED; /* 0: VRAM */
    *bytes = (uint64_t)VRAM_GIB << 30;
    return SUCCESS;
}

status_t amdsmi_get_gpu_asic_info(void *handle, struct asic_info *info) {
    RESOLVE(handle);
    memset(info, 0, sizeof *info);
    snprintf(info->market_name, sizeof info->market_name, "AMD Instinct MI300X (emulated)");
    snprintf(info->vendor_name, sizeof info->vendor_name, "Advanced Micro Devices Inc. [AMD/ATI]");
    snprintf(info->asic_serial, sizeof info->asic_serial, "%016X", 0xa300 + gpu);
    info->vendor_id = 0x1002;
    info->device_id = 0x74a1;
    info->oam_id = gpu;
    info->compute_units = COMPUTE_UNITS / MODE_PARTITIONS[seen.mode[gpu]];
    info->target_graphics_version = 0x942;
    return SUCCESS;
}

status_t amdsmi_get_gpu_process_list(void *handle, uint32_t *count, void *processes) {
    (void)processes;
    RESOLVE(handle);
    *count = 0;
    return SUCCESS;
}
