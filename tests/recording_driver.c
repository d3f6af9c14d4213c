/* A CUDA driver of a GPU with compute capability 9.0 that is not there: launches start nothing and are kept.
 *
 * It has those functions of libcuda.so.1 that Triton's launcher calls; tried with Triton 3.6 and 3.8.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, MOST_PARAMETERS = 64, PLENTY = 1024 };
/* CUdevice_attribute */
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, SHARED_MEMORY_OF_A_BLOCK = 97 };
/* CUfunction_attribute */
enum { THREADS_OF_A_BLOCK = 0 };

static int count;
static int sizes[MOST_PARAMETERS];
static uint64_t values[MOST_PARAMETERS];
static unsigned programs;

/* The next launch has so many parameters, of so many bytes each. Its values are all ones if it does not come. */
void expect(int parameters, const int *bytes) {
    count = parameters;
    memcpy(sizes, bytes, parameters * sizeof(int));
    memset(values, 0xff, sizeof values);
    programs = 0;
}

const uint64_t *launched_values(void) { return values; }

unsigned launched_programs(void) { return programs; }

/* config begins with the grid's three sizes. */
int cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
    (void)function, (void)extra;
    programs = config[0] * config[1] * config[2];
    for (int number = 0; number < count; number++) {
        values[number] = 0;
        memcpy(&values[number], parameters[number], sizes[number]);
    }
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case CAPABILITY_MAJOR: *value = 9; break;
    case CAPABILITY_MINOR: *value = 0; break;
    case SHARED_MEMORY_OF_A_BLOCK: *value = 227 * 1024; break;
    default: *value = PLENTY;
    }
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == THREADS_OF_A_BLOCK ? PLENTY : 0;
    return SUCCESS;
}

/* The memory of this machine counts as the GPU's. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    (void)attribute;
    memcpy(value, &pointer, sizeof pointer);
    return SUCCESS;
}

static int make(void **object) {
    static int only;
    *object = &only;
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) { return make(context); }

int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    return make(context);
}

int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    return make(module);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    return make(function);
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "an error of the recording driver";
    return SUCCESS;
}

/* Nothing is to do, and nothing is read of what they return. */
int cuCtxGetDevice(int *device) { return cuDeviceGet(device, 0); }
int cuCtxGetLimit(void) { return SUCCESS; }
int cuCtxSetCurrent(void) { return SUCCESS; }
int cuCtxSetLimit(void) { return SUCCESS; }
int cuFuncSetAttribute(void) { return SUCCESS; }
int cuFuncSetCacheConfig(void) { return SUCCESS; }
int cuModuleUnload(void) { return SUCCESS; }
int cuOccupancyMaxActiveClusters(void) { return SUCCESS; }
int cuTensorMapEncodeIm2col(void) { return SUCCESS; }
int cuTensorMapEncodeTiled(void) { return SUCCESS; }
