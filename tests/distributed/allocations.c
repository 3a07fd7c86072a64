// Counts what torch's CPU allocator holds, to the byte, beneath everything that torch itself says about it.
//
// libc10.so takes all memory of CPU tensors with posix_memalign and gives it back with free. watch() puts counting
// functions into its own table of imported symbols, so that nobody else's memory is counted, whatever thread asks.
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BUCKETS (1 << 16)

struct block {
  void *start;
  size_t bytes;
  struct block *next;
};

static struct block *blocks[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long live_bytes, peak_bytes;

static struct block **bucket_of(void *start) { return &blocks[((uintptr_t)start >> 6) % BUCKETS]; }

static int counting_memalign(void **start, size_t alignment, size_t bytes) {
  int error = posix_memalign(start, alignment, bytes);
  if (error) return error;
  struct block *block = malloc(sizeof *block);
  if (!block) abort();
  pthread_mutex_lock(&lock);
  struct block **bucket = bucket_of(*start);
  *block = (struct block){*start, bytes, *bucket};
  *bucket = block;
  live_bytes += bytes;
  if (live_bytes > peak_bytes) peak_bytes = live_bytes;
  pthread_mutex_unlock(&lock);
  return 0;
}

static void counting_free(void *start) {
  struct block *found = NULL;
  pthread_mutex_lock(&lock);
  for (struct block **at = bucket_of(start); *at; at = &(*at)->next)
    if ((*at)->start == start) {
      found = *at;
      *at = found->next;
      live_bytes -= found->bytes;
      break;
    }
  pthread_mutex_unlock(&lock);
  free(found);
  free(start);
}

static void put(void **slot, void *function) {
  uintptr_t page = sysconf(_SC_PAGESIZE), first = (uintptr_t)slot & ~(page - 1);
  if (mprotect((void *)first, page, PROT_READ | PROT_WRITE)) abort();
  *slot = function;
}

static int patch(struct dl_phdr_info *library, size_t size, void *count) {
  (void)size;
  const char *name = strrchr(library->dlpi_name, '/');
  if (!name || strcmp(name, "/libc10.so")) return 0;
  const ElfW(Dyn) *dynamic = NULL;
  for (int i = 0; i < library->dlpi_phnum; i++)
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = (void *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
  const ElfW(Sym) *symbols = NULL;
  const char *strings = NULL;
  const ElfW(Rela) *tables[2] = {NULL, NULL};
  size_t sizes[2] = {0, 0};
  for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) switch (dynamic->d_tag) {
      case DT_SYMTAB: symbols = (void *)dynamic->d_un.d_ptr; break;
      case DT_STRTAB: strings = (void *)dynamic->d_un.d_ptr; break;
      case DT_RELA: tables[0] = (void *)dynamic->d_un.d_ptr; break;
      case DT_RELASZ: sizes[0] = dynamic->d_un.d_val; break;
      case DT_JMPREL: tables[1] = (void *)dynamic->d_un.d_ptr; break;
      case DT_PLTRELSZ: sizes[1] = dynamic->d_un.d_val; break;
    }
  for (int t = 0; t < 2 && symbols && strings; t++)
    for (size_t i = 0; tables[t] && i < sizes[t] / sizeof(ElfW(Rela)); i++) {
      const char *symbol = strings + symbols[tables[t][i].r_info >> 32].st_name;
      void **slot = (void **)(library->dlpi_addr + tables[t][i].r_offset);
      if (!strcmp(symbol, "posix_memalign")) put(slot, counting_memalign), *(int *)count |= 1;
      if (!strcmp(symbol, "free")) put(slot, counting_free), *(int *)count |= 2;
    }
  return 1;
}

// From now on blocks are counted; those from before are not. Returns 0, or ENOTSUP where libc10.so imports neither.
int watch(void) {
  int found = 0;
  dl_iterate_phdr(patch, &found);
  return found == 3 ? 0 : ENOTSUP;
}

long live(void) { return live_bytes; }

long peak(void) { return peak_bytes; }

void restart(void) {
  pthread_mutex_lock(&lock);
  peak_bytes = live_bytes;
  pthread_mutex_unlock(&lock);
}
