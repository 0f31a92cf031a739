#include "octet_0.1.0.h"  // not changed since the release: the programs compiled with it exist
#define CLIENT client_0_1
#include "client.h"
