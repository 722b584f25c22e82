// An MPI library of another version. It is linked with the real one, and replaces only this function.
#include <mpi_abi.h>
#include <string.h>

int MPI_Get_library_version(char* text, int* length) {
  const int code = PMPI_Get_library_version(text, length); // without a call, the linker would leave out the library
  strcpy(text, "AnotherMPI 7.8.9, of a test");
  *length = (int)strlen(text);
  return code;
}
