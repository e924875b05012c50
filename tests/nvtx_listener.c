/* Listens to a process's NVTX calls: a line for each, in the file that NVTX_LISTENER_FILE names.

   Fields are parted by tabs: thread and event, then what the event has:
     push, start: domain, name, category, colour, bytes, pages, for start the range's number
     pop: domain    end: domain, number
     category: domain, number, name    string: domain, string

   What follows declares by hand the part of NVTX's injection interface, version 3, that is used here,
   so that no headers of CUDA are needed. Loaded by NVTX_INJECTION64_PATH. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TABLE_OF_CALLBACKS = 1, MODULE_CORE2 = 5 };
enum { RANGE_START = 2, RANGE_END = 3, RANGE_PUSH = 4, RANGE_POP = 5, NAME_CATEGORY = 8,
       REGISTER_STRING = 10, CREATE_DOMAIN = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3, PAYLOAD_INT64 = 2 };
#define PAYLOAD_STRUCTURE ((int32_t)0xDFBD0009)

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, num_payloads;
    union { int64_t number; const void *structures; } payload;
    int32_t message_type;
    const char *message; /* a registered string is what `register_string` has returned */
} Attributes;

typedef struct { uint64_t schema; size_t size; const void *data; } Structure;

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*functions_of)(int module, Function ***table, unsigned *size);
} Callbacks;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static uint64_t num_started;

static void begin_line(const char *event, const char *domain) {
    pthread_mutex_lock(&lock);
    fprintf(file, "%ld\t%s\t%s", (long)syscall(SYS_gettid), event, domain ? domain : "");
}

static void end_line(void) {
    fputc('\n', file);
    fflush(file);
    pthread_mutex_unlock(&lock);
}

static void write_attributes(const Attributes *event) {
    int64_t values[2] = {-1, -1}; /* bytes and pages */
    int named = event->message_type == MESSAGE_ASCII || event->message_type == MESSAGE_REGISTERED;
    if (event->payload_type == PAYLOAD_INT64) values[0] = event->payload.number;
    if (event->payload_type == PAYLOAD_STRUCTURE) {
        const Structure *first = event->payload.structures;
        if (first->size == sizeof values) memcpy(values, first->data, sizeof values);
    }
    fprintf(file, "\t%s\t%u\t%08x\t%lld\t%lld", named ? event->message : "", event->category,
            event->color, (long long)values[0], (long long)values[1]);
}

static int push(const char *domain, const Attributes *event) {
    begin_line("push", domain);
    write_attributes(event);
    end_line();
    return 0;
}

static int pop(const char *domain) {
    begin_line("pop", domain);
    end_line();
    return 0;
}

static uint64_t start(const char *domain, const Attributes *event) {
    begin_line("start", domain);
    uint64_t number = ++num_started;
    write_attributes(event);
    fprintf(file, "\t%llu", (unsigned long long)number);
    end_line();
    return number;
}

static void end(const char *domain, uint64_t number) {
    begin_line("end", domain);
    fprintf(file, "\t%llu", (unsigned long long)number);
    end_line();
}

static void name_category(const char *domain, uint32_t number, const char *name) {
    begin_line("category", domain);
    fprintf(file, "\t%u\t%s", number, name);
    end_line();
}

static const char *register_string(const char *domain, const char *string) {
    begin_line("string", domain);
    fprintf(file, "\t%s", string);
    end_line();
    return strdup(string);
}

static const char *create_domain(const char *name) { return strdup(name); }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const char *path = getenv("NVTX_LISTENER_FILE");
    const Callbacks *callbacks = export_table(TABLE_OF_CALLBACKS);
    Function **table;
    unsigned size;
    if (!path || !callbacks || !callbacks->functions_of(MODULE_CORE2, &table, &size)) return 0;
    if (!file && !(file = fopen(path, "a"))) return 0;
    *table[RANGE_PUSH] = (Function)push;
    *table[RANGE_POP] = (Function)pop;
    *table[RANGE_START] = (Function)start;
    *table[RANGE_END] = (Function)end;
    *table[NAME_CATEGORY] = (Function)name_category;
    *table[REGISTER_STRING] = (Function)register_string;
    *table[CREATE_DOMAIN] = (Function)create_domain;
    return 1;
}
