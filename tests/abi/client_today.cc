#include <octet/octet_study.h>
#define CLIENT client_today
#include "client.h"
