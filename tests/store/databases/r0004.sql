BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('r0004');
CREATE TABLE api_keys (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id)
);
INSERT INTO "api_keys" VALUES('key-abcde','{"id":"key-abcde","name":"ci","hash":"abababababababababababababababababababababababababababababababab","created_at":1.5,"revoked_at":null,"models":["m"]}');
CREATE TABLE certificates (
	serial TEXT NOT NULL, 
	node TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_certificates PRIMARY KEY (serial)
);
INSERT INTO "certificates" VALUES('0a','llmgw-node01','{"serial":"0a","node":"llmgw-node01","role":"node","source":"renewal","state":"current","issued_at":1764439403.5,"not_after":1764525803.5,"chain":"01","previous":"02","key_hash":"abababababababababababababababababababababababababababababababab","issuer":"0123456789ab","recoveries":0,"machine":"ffffffffffffffff","first_used_at":1764439404.0,"ended_at":null,"why":""}');
CREATE TABLE cluster (
	id INTEGER NOT NULL CONSTRAINT ck_cluster_one_row CHECK (id = 1), 
	secret TEXT NOT NULL, 
	admin_token_hash TEXT, 
	CONSTRAINT pk_cluster PRIMARY KEY (id)
);
INSERT INTO "cluster" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd');
CREATE TABLE drains (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_drains PRIMARY KEY (id)
);
INSERT INTO "drains" VALUES('llmgw-node01','{"node":"llmgw-node01","since":4.0,"state":"moving","why":"","in_flight_s":60.0,"allow_downtime":["x"],"force":false,"wait":true,"moves":[{"replica":"m-abcde","model":"m","state":"starting","why":"loading","targets":["llmgw-node02"],"weights_there":true,"downtime":false,"replacement":"m-fghij","since":5.0,"seconds":{"pending":0.5},"finished":0,"broken":0}]}');
CREATE TABLE engines (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_engines PRIMARY KEY (id)
);
INSERT INTO "engines" VALUES('llamacpp','{"name":"llamacpp","spec":{"name":"llamacpp","version":"b10991","source":"https://mirror/l.tar.gz","sha256":"abababababababababababababababababababababababababababababababab","package":null},"previous":{"name":"llamacpp","version":"b10068","source":"index","sha256":null,"package":"skulk"},"rolled_back":"m-abcde failed 3 times in a row","since":6.0,"older":[{"name":"llamacpp","version":"b9000","source":"github","sha256":null,"package":null}]}');
CREATE TABLE events (
	id TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id)
);
INSERT INTO "events" VALUES('00000000000000000000000001','llmgw-node01','{"id":"00000000000000000000000001","at":1.0,"kind":"node.ready","subject":"llmgw-node01","words":"is ready","data":{"n":"1"}}');
CREATE TABLE lease (
	id INTEGER NOT NULL CONSTRAINT ck_lease_one_row CHECK (id = 1), 
	epoch INTEGER NOT NULL, 
	holder TEXT NOT NULL, 
	taken_at TEXT NOT NULL, 
	writes INTEGER NOT NULL, renewed_at FLOAT DEFAULT '0' NOT NULL, lease_s FLOAT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_lease PRIMARY KEY (id)
);
INSERT INTO "lease" VALUES(1,1764439403,'llmgw-server','2025-11-29 18:03:23',5,1764439403.5,10.0);
CREATE TABLE nodes (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_nodes PRIMARY KEY (id)
);
INSERT INTO "nodes" VALUES('llmgw-node01','{"id":"llmgw-node01","state":"ready","since":1764439403.25,"why":"heard","address":"10.0.0.11:51034","agent_version":"0.1.0","inventory":{"hostname":"llmgw-node01","os":"Debian GNU/Linux 12","kernel":"6.1.0","libc":"glibc 2.36","cpu":{"model":"AMD EPYC 9554","architecture":"x86_64","cores":64,"extensions":["avx2","fma"]},"memory_bytes":549755813888,"mgmt_addr":"10.0.0.11","mgmt_interface":null,"gpus":[{"index":0,"uuid":"GPU-0","name":"H100","memory_bytes":85899345920,"memory_shared":false,"nvlink_group":null,"numa_node":null,"problem":null},{"index":1,"uuid":"GPU-1","name":"?","memory_bytes":null,"memory_shared":false,"nvlink_group":null,"numa_node":null,"problem":"GPU is lost"}],"gpu_source":"none","driver":null,"hcas":[],"fabrics":[],"labels":{"rack":"a3","größe":"groß"},"ports":{"first":20000,"last":29999},"launch_modes":{},"warnings":[]},"probed":true,"engines":[{"name":"llamacpp","version":"b10991","state":"installed","words":"","since":5.0,"named":false}],"weights":["hf://org/name"]}');
CREATE TABLE replicas (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_replicas PRIMARY KEY (id)
);
INSERT INTO "replicas" VALUES('m-abcde','{"id":"m-abcde","model":"m","state":"ready","since":1764439500.0,"why":"answered one token","generation":3,"profile":{"name":"cpu","engine":"llamacpp","nodes":1,"gpus_per_node":0,"tensor_parallel":1,"pipeline_parallel":1,"memory_bytes":2147483648,"context":null,"parallel":null,"max_concurrency":null,"launch_mode":null,"node_selector":{},"args":["--no-webui"],"sim":null,"engine_version":""},"spec":{"name":"m","profiles":[{"name":"cpu","engine":"llamacpp","nodes":1,"gpus_per_node":0,"tensor_parallel":1,"pipeline_parallel":1,"memory_bytes":2147483648,"context":null,"parallel":null,"max_concurrency":null,"launch_mode":null,"node_selector":{},"args":["--no-webui"],"sim":null,"engine_version":""}],"source":"hf://org/name","aliases":["m-latest"],"task":"generate","replicas":1},"placements":[{"node":"llmgw-node01","gpus":[0],"gpu_uuids":["GPU-0"],"memory_bytes":0,"port":20100,"address":""}],"restarts":2,"failures":1,"retry_at":1764439600.0,"number":0,"endpoint":null,"lost":false,"previous":[],"taken_port":0,"last_exit":{"status":null,"signal":"SIGKILL","oom":false,"last_lines":["loading","out of memory"]},"fabric":null,"dist_init":null,"replaces":null,"restart":false,"may_stop_first":false,"not_rolled_to":null,"story":[{"at":0.0,"generation":3,"state":"starting","why":"line 0"},{"at":1.0,"generation":3,"state":"starting","why":"line 1"},{"at":2.0,"generation":3,"state":"starting","why":"line 2"}]}');
CREATE TABLE replicas_made (
	model TEXT NOT NULL, 
	made INTEGER NOT NULL, 
	CONSTRAINT pk_replicas_made PRIMARY KEY (model)
);
INSERT INTO "replicas_made" VALUES('m',1);
CREATE TABLE revocations (
	id TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_revocations PRIMARY KEY (id)
);
INSERT INTO "revocations" VALUES('node:n9','{"kind":"node","subject":"n9","at":5.5,"why":"stolen","removed":false}');
CREATE TABLE scale (
	model TEXT NOT NULL, 
	replicas INTEGER NOT NULL, 
	base INTEGER NOT NULL, 
	CONSTRAINT pk_scale PRIMARY KEY (model)
);
INSERT INTO "scale" VALUES('m',2,1);
CREATE TABLE tokens (
	id TEXT NOT NULL, 
	used_key TEXT NOT NULL, 
	doc TEXT NOT NULL, 
	CONSTRAINT pk_tokens PRIMARY KEY (id)
);
INSERT INTO "tokens" VALUES('abcdefgh','','{"id":"abcdefgh","node":"llmgw-node01","hash":"cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd","created_at":1.5,"expires_at":901.5,"labels":{"größe":"groß"},"replace":false,"used_key":"","used_at":null,"used_from":"","answer":""}');
CREATE INDEX ix_events_subject_id ON events (subject, id);
COMMIT;
