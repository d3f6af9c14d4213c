// What the tests call: a kernel of models/kernels/cuda/group_conv.cu, simulated on a CPU.

#include "group_conv.cu"

namespace {

template <class Arguments, void (*function)(const Arguments)>
void body(const void* arguments) {
    function(*static_cast<const Arguments*>(arguments));
}

struct Named {
    const char* name;
    void (*body)(const void*);
};

const Named KERNELS[] = {
    {"output", body<Convolving, output>},
    {"output_with_statistics", body<Convolving, output_with_statistics>},
    {"input_gradient", body<Convolving, input_gradient>},
    {"weight_gradient", body<Summing, weight_gradient>},
    {"add_parts", body<Adding, add_parts>},
};

}  // namespace

// Returns how often rows of matrices waited for others in their banks; -1 where threads did not end, did different
// things together, or wrote behind their memory.
extern "C" int64_t simulate(const char* name,
                            const void* arguments,
                            int blocks,
                            int threads,
                            int shared_bytes,
                            int descending) {
    for (const Named& kernel : KERNELS) {
        if (std::strcmp(kernel.name, name)) continue;
        block.body = kernel.body;
        block.arguments = arguments;
        block.conflicts = 0;
        for (int place = 0; place < blocks; place++) {
            blockIdx.x = descending ? blocks - 1 - place : place;
            if (!run_block(threads, shared_bytes, descending)) return -1;
        }
        return block.conflicts;
    }
    return -1;
}
