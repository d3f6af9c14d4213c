/* Loaded into a run (LD_PRELOAD) to make its clock jump and its disk fail, as a file of two numbers says:
   int64 nanoseconds to add to the time of day, int64 whether fsync fails with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *control(void) {
  static volatile int64_t *mapped;
  if (!mapped) {
    const char *path = getenv("FAULTS_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file >= 0 ? mmap(0, 16, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    static const int64_t none[2];
    mapped = found == MAP_FAILED ? (volatile int64_t *)none : found;
    if (file >= 0) close(file);
  }
  return mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control()[0] / 1000000000;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &time)) return -1;
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}

int fsync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  if (control()[1]) {
    errno = EIO;
    return -1;
  }
  return real(file);
}
